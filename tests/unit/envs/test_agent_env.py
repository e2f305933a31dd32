"""Agents over HTTP as environments: requests become turns, replies come from the policy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.kit.places import MODEL

pytest.importorskip("openai")

from dora_rl.chat.conversation import Turn as ChatTurn
from dora_rl.config import EnvConfig, EnvironmentEntry
from dora_rl.envs.agent import Call, Episode
from dora_rl.envs.base import Row, Turn, TurnText
from dora_rl.envs.host import Answer, Ask, Host, load_environments
from dora_rl.histories import ROOT
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import Branch, RequestId, UserError
from dora_rl.user_code import listen, trace_of

TOKENIZER = open_tokenizer(MODEL, False)
EOS = 1
PROMPT, SECOND = "03:271\n", "02:513\n"
RID = RequestId(5, 2)


def ids(text):
    return tuple(TOKENIZER.encode(text))


def host_of(function, **entry):
    where = f"{Path(__file__).parent / 'agents_for_tests.py'}:{function}"
    one = EnvironmentEntry(name="agent", options={"agent": where}, timeout_s=20.0, **entry)
    return Host(load_environments(EnvConfig(environments=(one,))), TurnText(TOKENIZER, {EOS}))


class Policy:
    """Plays the run's part: keeps the trajectory, asks after each turn."""

    def __init__(self, host, prompt_ids=None, answer="=637"):
        self.host, self.prompt_ids = host, ids(PROMPT) if prompt_ids is None else prompt_ids
        self.row = Row(PROMPT, PROMPT, answer, {}, self.prompt_ids)
        self.tokens: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.branches: list[Branch] = []

    async def ask(self) -> Answer:
        past = (tuple(self.tokens), tuple(self.mask), tuple(self.logprobs))
        asked = Ask(RID, "agent", self.row, 0, *past, version=4, branches=tuple(self.branches))
        answer = await self.host.answer(asked)
        assert not answer.error, answer.error
        if answer.branch is not None:
            self.branches = [*(self.branches or [ROOT]), answer.branch]
        self._add(answer.token_ids, 0)
        return answer

    async def write(self, text: str) -> Answer:
        self._add((*ids(text), EOS), 1)
        return await self.ask()

    def _add(self, new, mask):
        self.tokens += new
        self.mask += [mask] * len(new)
        self.logprobs += [-0.5 * mask] * len(new)


def play(function, *replies, prompt_ids=None, **entry):
    """Every answer to the policy: the opening, then one for each reply."""

    async def story():
        host = host_of(function, **entry)
        policy = Policy(host, prompt_ids)
        try:
            return [await policy.ask(), *[await policy.write(reply) for reply in replies]]
        finally:
            host.close()

    return asyncio.run(story())


@pytest.mark.parametrize("function", ["ask_twice", "ask_twice_streamed"])
def test_requests_become_turns_and_the_reward_ends_the_episode(function):
    opening, second, end = play(function, "=111", "=637")
    assert opening == Answer(), "the row's prompt is all of the first request"
    assert second.token_ids == ids(SECOND), "only what is new; the reply is not tokenised again"
    assert end.done and end.reward == (0.5 if function == "ask_twice" else 1.0)


def test_an_agent_with_its_own_prompt():
    opening, end = play("own_prompt", "=1", prompt_ids=ids(PROMPT)[:1])
    assert opening.token_ids == ids("00" + PROMPT)[1:] and end.done and end.reward == 1.0
    opening, end = play("own_prompt", "=1")
    assert opening.branch == Branch(0, 0, 1 - len(ids(PROMPT))), "it shares the first token alone"
    assert opening.token_ids == ids("00" + PROMPT)[1:] and end.done and end.reward == 1.0


def test_a_program_with_the_clients_variables():
    """As the docs bring an agent: both clients in one episode, told by their environment alone."""
    pytest.importorskip("anthropic")
    opening, second, end = play("as_a_program", "=111", "=637")
    assert opening == Answer() and second.token_ids == ids(SECOND) and second.branch is None
    assert end.done and end.reward == 1.0


def call(episode, text):
    return Call(episode, (), ChatTurn((), ids(text), ids(text), continued=False))


def test_requests_side_by_side_find_their_own_replies_again():
    """An agent that runs again makes them the other way round, and gets what each was answered."""

    async def story():
        episode = Episode("one", ids(PROMPT))
        late, early = call(episode, PROMPT + "4"), call(episode, PROMPT + "5")
        episode.begin(early)
        assert await episode.next_call() is early
        known = Turn("=4", ids("=4"), read_ids=late.history)
        answered = asyncio.create_task(episode.answer(known))
        await asyncio.sleep(0)
        episode.begin(late)
        await answered
        assert late.answer.result() is known and not early.answer.done()
        assert await episode.next_call() is early
        await episode.answer(Turn("=5", ids("=5")))
        assert (late.number, early.number) == (1, 2)
        return episode.tree.place((*ids(PROMPT + "5"), *ids("=5"), 3))

    assert asyncio.run(story()) == (None, (3,)), "the tree is in the order of the turns"


def test_an_agent_that_asks_for_something_else_is_answered_as_before():
    """Its tree stays that of the trajectory: what it goes on from is what was read then."""

    async def story():
        episode = Episode("one", ids(PROMPT))
        other = call(episode, PROMPT + "6")
        episode.begin(other)
        await episode.next_call()
        episode.end()
        await episode.answer(Turn("=4", ids("=4"), read_ids=ids(PROMPT + "4")))
        assert other.answer.done() and other.history == ids(PROMPT + "4")
        return episode.tree.place((*ids(PROMPT + "4"), *ids("=4"), 3))

    assert asyncio.run(story()) == (None, (3,))


def test_what_nobody_waits_for_any_more_is_not_asked():
    """A client that leaves takes its request back; one that was asked keeps its turn."""

    async def story():
        episode = Episode("one", ids(PROMPT))
        gone, there = call(episode, PROMPT + "4"), call(episode, PROMPT + "5")
        for one in (gone, there):
            episode.begin(one)
        gone.close()
        assert await episode.next_call() is there
        there.close()
        await episode.answer(Turn("=5", ids("=5")))
        episode.end(reward=1.0)
        assert await episode.next_call() is None and episode.num_turns == 1

    asyncio.run(story())


def test_a_lost_episode_whose_client_leaves_meanwhile_goes_on():
    """It waits for the request that was made then; the one that came instead is taken back."""

    async def story():
        episode = Episode("one", ids(PROMPT))
        other = call(episode, PROMPT + "6")
        episode.begin(other)
        await episode.next_call()
        known = Turn("=4", ids("=4"), read_ids=ids(PROMPT + "4"))
        answered = asyncio.create_task(episode.answer(known))
        await asyncio.sleep(0)
        other.close()
        episode.end(reward=1.0)
        await answered
        assert await episode.next_call() is None and episode.num_turns == 1
        return episode.tree.place((*ids(PROMPT + "4"), *ids("=4"), 3))

    assert asyncio.run(story()) == (None, (3,))


def test_rewards_are_for_the_answers_that_the_agent_got():
    """A client gave up while the policy was writing, and asked again: one answer, two turns."""

    async def story(*rewards):
        episode = Episode("one", ids(PROMPT))
        for gone in (True, False):
            one = call(episode, PROMPT)
            episode.begin(one)
            assert await episode.next_call() is one
            if gone:
                one.close()
            await episode.answer(Turn("=5", ids("=5")))
            if not gone:
                assert [piece.token_ids async for piece in one.pieces()] == [ids("=5")]
        episode.end(turn_rewards=rewards)
        return episode.rewards_of_turns()

    assert asyncio.run(story(0.5)) == (0.0, 0.5)
    assert asyncio.run(story(0.25, 0.5)) == (0.25, 0.5), "for every turn, if it knows of both"
    with pytest.raises(RuntimeError, match="3 rewards for 2 turns"):
        asyncio.run(story(1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("function", "words"),
    [("too_few_rewards", "2 rewards for 1 turns"), ("odd_rewards", "not a finite number, a list")],
)
def test_rewards_of_turns_are_one_for_each(function, words):
    with pytest.raises(AssertionError, match=words):
        play(function, "=1")


def test_another_history_is_a_branch():
    opening, second, end = play("forgets", "=1", "=2")
    assert opening.branch is None and opening.token_ids == ()
    assert second.branch == Branch(len("=1") + 1, 0, -len(ids(PROMPT)))
    assert second.token_ids == ids("11:111\n") and end.done


def test_sampling_of_the_request_is_not_looked_at_and_keys_are_private():
    _, end = play("peeks", "=1234")
    assert end.done and end.reward is None, "left to reward.functions"


@pytest.mark.parametrize(
    ("function", "replies", "words"),
    [
        ("says_nothing", [], "without a single request"),
        ("raises", [], "ValueError: cannot do 03:271"),
        ("exits", [], "SystemExit: cannot do 03:271"),
        ("exits_later", [], "SystemExit: cannot do 03:271"),
        ("returns_words", ["=1"], "'good', not a finite number"),
    ],
)
def test_what_cannot_be_trained_fails_that_sample_with_its_reason(function, replies, words):
    with pytest.raises(AssertionError, match=words):
        play(function, *replies)


def test_the_traceback_shows_where_the_agent_raised():
    traces = []
    listen(lambda what, error: traces.append((what, trace_of(error))))
    try:
        with pytest.raises(AssertionError):
            play("raises")
    finally:
        listen(None)
    ((what, trace),) = traces
    assert what == "environment agent"
    assert "agents_for_tests.py" in trace and "ValueError: cannot do 03:271" in trace


def test_a_lost_episode_is_built_again_from_its_turns():
    """Another process (host) is asked with the whole trajectory: the agent runs again."""

    async def story():
        first, second = host_of("ask_twice"), host_of("ask_twice")
        policy = Policy(first)
        await policy.ask()
        answer = await policy.write("=637")
        first.close()
        policy.host = second
        end = await policy.write("=637")
        second.close()
        return answer, end

    answer, end = asyncio.run(story())
    assert answer.token_ids == ids(SECOND) and end.done and end.reward == 1.0


def test_an_episode_at_its_limit_of_turns_ends_there():
    _, end = play("ask_twice", "=1", turns_max=1)
    assert end.done and end.cut and end.reward is None


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("agents_for_tests.py:wants_more", "wants browser"),
        ("agents_for_tests.py:nobody", "there is no"),
        ("none.py:agent", "does not exist"),
        ("agents_for_tests.py:json", "is not a function"),
    ],
)
def test_a_wrong_agent_is_one_line_before_anything_starts(agent, words):
    where = str(Path(__file__).parent / agent)
    one = EnvironmentEntry(name="agent", options={"agent": where})
    with pytest.raises(UserError, match=words):
        load_environments(EnvConfig(environments=(one,)))
