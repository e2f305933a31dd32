"""Agents over HTTP as environments: requests become turns, replies come from the policy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.kit.places import MODEL

pytest.importorskip("openai")

from dora_rl.config import EnvConfig, EnvironmentEntry
from dora_rl.envs.base import Row, TurnText
from dora_rl.envs.host import Answer, Ask, Host, load_environments
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

    async def ask(self) -> Answer:
        past = (tuple(self.tokens), tuple(self.mask), tuple(self.logprobs))
        answer = await self.host.answer(Ask(RID, "agent", self.row, 0, *past, version=4))
        assert not answer.error, answer.error
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
