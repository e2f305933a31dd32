"""Episodes: the same answer twice, lost ones built again, failures as answers, ids left alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dora_rl.config import EnvConfig, EnvironmentEntry
from dora_rl.envs.base import Environment, Observation, Row, Turn, TurnText, spans, turns_of
from dora_rl.envs.host import Answer, Ask, Host, LoadedEnvironment, load_environments
from dora_rl.types import Branch, RequestId, UserError

STOP = 99


class PairTokenizer:
    """Merges "aa" into one token, as byte-pair encoders do: decoding and encoding again changes
    ids. Ids: a 1, b 2, aa 3, stop 99."""

    texts: ClassVar = {1: "a", 2: "b", 3: "aa", STOP: ""}
    chat_template = "yes"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        ids: list[int] = []
        while text:
            if text.startswith("<end>"):
                ids, text = [*ids, STOP], text[5:]
            elif text.startswith("aa"):
                ids, text = [*ids, 3], text[2:]
            else:
                ids, text = [*ids, 1 if text[0] == "a" else 2], text[1:]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return "".join(self.texts[token] for token in token_ids)

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        assert options["add_generation_prompt"]
        return "".join(f"{message['content']}<end>b" for message in conversation)


class Counting(Environment):
    """Says "b" and counts; gives half a point a turn, ends at "b"."""

    num_resets = 0
    num_steps = 0

    def __init__(self, opening: str = "") -> None:
        self.seen: list[Turn] = []
        self.opening = opening

    def reset(self, row: Row, seed: int) -> Observation | None:
        del row, seed
        type(self).num_resets += 1
        return Observation(self.opening) if self.opens else None

    def step(self, turn: Turn) -> Observation:
        type(self).num_steps += 1
        self.seen.append(turn)
        assert turn.number == len(self.seen)
        return Observation("aa", reward=0.5, done=turn.text == "b")


class Opening(Counting):
    opens = True


class Bad(Environment):
    def step(self, turn: Turn) -> Observation:
        if turn.text == "a":
            raise TimeoutError("the user's own")
        if turn.text == "b":
            threading.Event().wait(30)
        if turn.text == "aa":
            return Observation("")
        if turn.text == "ab":
            return Observation(reward=float("nan"), done=True)
        return "what"  # type: ignore[return-value]


class Exits(Environment):
    def step(self, turn: Turn) -> Observation:
        raise SystemExit(f"after {turn.text}")


class ExitsLater(Exits):
    async def step(self, turn: Turn) -> Observation:  # type: ignore[override]
        return super().step(turn)


class Slow(Environment):
    async def step(self, turn: Turn) -> Observation:
        await asyncio.sleep(30 if turn.text == "b" else 0)
        return Observation("b")


def host_of(kind: type[Environment], **entry: Any) -> Host:
    Counting.num_resets = Counting.num_steps = 0
    Opening.num_resets = Opening.num_steps = 0
    config = EnvConfig.model_validate({"environments": [{"name": "one", **entry}]})
    loaded = LoadedEnvironment("one", config.environments[0], kind)
    return Host({"one": loaded}, TurnText(PairTokenizer(), {STOP}))


def ask(*pieces: tuple[Sequence[int], int], sample: int = 0) -> Ask:
    ids = tuple(token for piece, _ in pieces for token in piece)
    mask = tuple(by for piece, by in pieces for _ in piece)
    return Ask(RequestId(7, sample), "one", Row("p"), 5, ids, mask)


def answers(host: Host, *asks: Ask) -> list[Answer]:
    async def run() -> list[Answer]:
        return [await host.answer(one) for one in asks]

    return asyncio.run(run())


def test_turns_are_the_runs_of_the_mask() -> None:
    assert spans([]) == []
    assert spans([0, 1, 1, 0, 1]) == [(0, 1, 0), (1, 3, 1), (3, 4, 0), (4, 5, 1)]
    assert turns_of((9, 1, 2, 8, 3), (0, 1, 1, 0, 1)) == [(1, 2), (3,)]


def test_ids_of_turns_are_never_tokenized_again() -> None:
    """The policy wrote "a", "a"; the tokenizer would write "aa" as one id."""
    text = TurnText(PairTokenizer(), {STOP})
    turn = text.read((1, 1, STOP), 1)
    assert turn.text == "aa" and turn.token_ids == (1, 1, STOP) and turn.stopped
    assert PairTokenizer().encode(turn.text) != [1, 1]
    host = host_of(Counting)
    first = ask(((1, 1, STOP), 1))
    (answer,) = answers(host, first)
    assert answer.token_ids == (3,), "only the observation is encoded"
    # The next question holds the policy's own ids; were they encoded again, the known turn would
    # differ and the episode would begin anew.
    (second,) = answers(host, ask(((1, 1, STOP), 1), ((3,), 0), ((2, STOP), 1)))
    assert second.done and second.reward == 1.0
    assert Counting.num_resets == 1 and Counting.num_steps == 2


def test_messages_go_through_the_template_behind_the_turn() -> None:
    text = TurnText(PairTokenizer(), {STOP})
    said = Observation([{"role": "tool", "content": "aa"}])
    assert text.write(said, (1, STOP)) == (2, 3, STOP, 2), "the policy wrote the end itself"
    assert text.write(said, (1, 1)) == (STOP, 2, 3, STOP, 2), "it was cut off before"
    assert text.write(Observation(token_ids=(8, 9)), (1,)) == (8, 9)


def test_asking_twice_takes_no_second_step() -> None:
    host, one = host_of(Counting), ask(((1, STOP), 1))
    first, again = answers(host, one, one)
    assert first == again and Counting.num_steps == 1


def test_a_lost_episode_is_built_again_by_its_steps() -> None:
    long = ask(((1, STOP), 1), ((3,), 0), ((1, 1), 1), ((3,), 0), ((2,), 1))
    fresh = host_of(Counting, latency_s=[5.0, 5.0])
    fresh._latency_s = lambda *_: 0.0  # type: ignore[method-assign]
    (answer,) = answers(fresh, long)
    assert answer == Answer(done=True, reward=1.5, turn_rewards=(0.5, 0.5, 0.5))
    assert (Counting.num_resets, Counting.num_steps) == (1, 3)


def test_other_tokens_begin_the_episode_anew() -> None:
    host = host_of(Counting)
    answers(host, ask(((1, STOP), 1)), ask(((1, 1, STOP), 1)))
    assert (Counting.num_resets, Counting.num_steps) == (2, 2)


def test_the_limit_of_turns_cuts() -> None:
    host = host_of(Counting, turns_max=2)
    one, two = answers(host, ask(((1,), 1)), ask(((1,), 1), ((3,), 0), ((1,), 1)))
    assert not one.done and one.reward == 0.5
    assert two == Answer(done=True, cut=True, reward=1.0, turn_rewards=(0.5, 0.5))


def test_an_environment_may_open_the_episode() -> None:
    host = host_of(Opening, options={"opening": "aab"})
    (opening, again) = answers(host, ask(), ask())
    assert opening.token_ids == (3, 2) and opening == again
    (first,) = answers(host, ask(((3, 2), 0), ((2,), 1)))
    assert first.done and Opening.num_resets == 1


def test_failures_are_answers(capfd: pytest.CaptureFixture[str]) -> None:
    patient, host = host_of(Bad, timeout_s=60.0), host_of(Bad, timeout_s=0.1)
    raised, empty, nan, wrong = answers(
        patient, ask(((1,), 1)), ask(((3,), 1)), ask(((1, 2), 1)), ask(((2, 2), 1))
    )
    (hung,) = answers(host, ask(((2,), 1), sample=1))
    assert "the user's own" in raised.error and not raised.hung
    assert "no tokens" in empty.error and "nan" in nan.error and "str" in wrong.error
    assert "did not answer within 0.1 s" in hung.error and hung.hung
    assert host.busy, "the stuck thread is known"


@pytest.mark.parametrize(
    ("branch", "fits"),
    [
        (Branch(2, 0, 2), True),
        (Branch(2, 0, -1), True),
        (Branch(1, 0, 0), False),
        (Branch(2, 1, 0), False),
        (Branch(2, -1, 0), False),
        (Branch(2, 0, 3), False),
        (Branch(2, 0, -3), False),
    ],
)
def test_a_branch_follows_what_is_there(branch: Branch, fits: bool) -> None:
    """What does not would end the instance that has the session."""

    class Forks(Environment):
        def step(self, turn: Turn) -> Observation:
            return Observation("a", branch=branch)

    one = LoadedEnvironment("forks", EnvironmentEntry(name="forks"), Forks)
    host = Host({"forks": one}, TurnText(PairTokenizer(), {STOP}))  # type: ignore[arg-type]
    row = Row("ab", token_ids=(1, 2))
    answer = asyncio.run(host.answer(Ask(RequestId(1, 0), "forks", row, 0, (1, STOP), (1, 1))))
    host.close()
    assert bool(answer.error) != fits
    assert (answer.branch == branch) if fits else "follows nothing" in answer.error


@pytest.mark.parametrize("kind", [Exits, ExitsLater])
def test_one_that_exits_fails_alone(kind: type[Environment]) -> None:
    one = LoadedEnvironment("exits", EnvironmentEntry(name="exits"), kind)
    host = Host({"exits": one}, TurnText(PairTokenizer(), {STOP}))  # type: ignore[arg-type]
    asked = Ask(RequestId(1, 0), "exits", Row("ab", token_ids=(1, 2)), 0, (1, STOP), (1, 1))
    answer = asyncio.run(host.answer(asked))
    host.close()
    assert "SystemExit: after a" in answer.error


def test_an_asynchronous_time_out_hangs_nobody() -> None:
    (slow,) = answers(host_of(Slow, timeout_s=0.1), ask(((2,), 1)))
    (fine,) = answers(host_of(Slow, timeout_s=60.0), ask(((1,), 1), sample=1))
    assert "did not answer" in slow.error and not slow.hung
    assert fine.token_ids == (2,)


def test_episodes_overlap() -> None:
    """Twenty synchronous steps that wait for each other end, because they run side by side."""
    barrier = threading.Barrier(20)

    class Meet(Environment):
        def step(self, turn: Turn) -> Observation:
            del turn
            barrier.wait(20)
            return Observation(reward=1.0, done=True)

    host = host_of(Meet)

    async def run() -> list[Answer]:
        return list(
            await asyncio.gather(*(host.answer(ask(((1,), 1), sample=i)) for i in range(20)))
        )

    assert all(answer.done for answer in asyncio.run(run()))


def test_forgotten_groups_are_closed() -> None:
    closed: list[int] = []

    class Closing(Counting):
        def close(self) -> None:
            closed.append(1)

    host = host_of(Closing)
    answers(host, ask(((1,), 1)), ask(((1,), 1), sample=1))
    host.forget(7)
    assert len(closed) == 2
    host.forget(7)
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ({"name": "calcualtor"}, "no environment 'calcualtor'"),
        ({"name": "dora_rl.envs.calculator:Nothing"}, "there is no"),
        ({"name": "missing.py:Env"}, "does not exist"),
        ({"name": "dora_rl.envs.calculator:operate"}, "not a class"),
        ({"name": "calculator", "options": {"x": 1}}, "cannot be made with the options"),
        ({"name": "calculator", "latency_s": [2, 1]}, "latency_s"),
    ],
)
def test_what_is_wrong_is_said_at_the_start(entry: dict[str, Any], line: str) -> None:
    config = EnvConfig.model_validate({"environments": [entry]})
    with pytest.raises(UserError, match=line):
        load_environments(config, Path("."))


def test_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dora_rl.envs.base import Environment, Observation\n"
        "class Mine(Environment):\n"
        "    def step(self, turn):\n"
        "        return Observation(reward=1.0, done=True)\n"
    )
    config = EnvConfig.model_validate({"environments": ["mine.py:Mine"]})
    (loaded,) = load_environments(config, tmp_path).values()
    assert loaded.make().step(Turn("x")) == Observation(reward=1.0, done=True)
