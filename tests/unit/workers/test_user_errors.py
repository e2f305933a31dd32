"""Tracebacks of the user's code: whole, once each, counted, in a file of bounded size."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from dora_rl.config import EnvConfig, RewardConfig
from dora_rl.envs.base import Environment, Observation, Row, Turn, TurnText
from dora_rl.envs.host import Ask, Host, load_environments
from dora_rl.rewards.base import ScoreItem
from dora_rl.rewards.function import FunctionReward
from dora_rl.types import RequestId
from dora_rl.user_code import listen, raised
from dora_rl.workers.last_words import PLACES_MAX, UserErrors, send_user_errors
from dora_rl.workers.messages import Message, UserRaised


class Wire:
    """A channel from a worker to the file of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.told: list[str] = []
        self.errors = UserErrors(run_dir, self.told.append)
        self.num_traces = 0
        listen(send_user_errors(self.send))

    def send(self, message: Message) -> None:
        assert isinstance(message, UserRaised)
        self.num_traces += bool(message.trace)
        self.errors.add("worker0", message)

    def text(self) -> str:
        self.errors.close()
        return self.errors.path.read_text()


@pytest.fixture
def wire(tmp_path: Path) -> Any:
    yield Wire(tmp_path)
    listen(None)


def deep_inside(answer: str) -> float:
    return 1.0 / len({answer: 1}[f"no {answer}"])  # type: ignore[arg-type]


def score(completion: str, answer: str) -> float:
    return deep_inside(answer)


def test_the_traceback_of_a_reward_is_kept_once_with_its_count(wire: Wire) -> None:
    reward = FunctionReward("mine.py:score", score)
    for number in range(25):
        reward.score([ScoreItem("p", "p", "c", answer=str(number))])
    text = wire.text()
    assert text.count("Traceback (most recent call last)") == wire.num_traces == 1
    assert "==== 25 times, reward mine.py:score (worker0)" in text
    assert "in deep_inside" in text and "KeyError: 'no 0'" in text
    assert len(wire.told) == 1
    assert "mine.py:score raised KeyError" in wire.told[0] and "user_errors.log" in wire.told[0]


def endless(completion: str, answer: str) -> float:
    while True:
        pass


def test_where_a_reward_hung_is_kept_too(wire: Wire) -> None:
    limits = RewardConfig(timeout_s=0.05)
    item = ScoreItem("p", "p", "c", answer="1")
    FunctionReward("mine.py:endless", endless, limits=limits).score([item])
    assert "interrupted after 0.05 s" in wire.text() and "in endless" in wire.text()


class Falls(Environment):
    def reset(self, row: Row, seed: int) -> None:
        return None

    def step(self, turn: Turn) -> Observation:
        raise LookupError("no such tool")


class Words:
    def read(self, ids: tuple[int, ...], number: int) -> Turn:
        return Turn("a", ids, number)


def test_the_traceback_of_an_environment_is_kept(wire: Wire) -> None:
    loaded = load_environments(
        EnvConfig.model_validate({"environments": [f"{__file__}:Falls"]}), Path(".")
    )
    host = Host(loaded, cast(TurnText, Words()))
    (label,) = loaded
    ask = Ask(RequestId(0, 0), label, Row("p", "p", None, {}, ()), 0, (1,), (1,))
    answer = asyncio.run(host.answer(ask))
    assert "LookupError" in answer.error
    assert "in step" in wire.text() and "LookupError: no such tool" in wire.text()


def test_the_file_does_not_grow_without_end(wire: Wire) -> None:
    for number in range(PLACES_MAX + 20):
        kind = type(f"Error{number}", (Exception,), {})
        for _ in range(3):
            try:
                raise kind("x" * 100_000)
            except kind as error:
                raised("reward f", error)
    text = wire.text()
    assert wire.errors.num == 3 * (PLACES_MAX + 20)
    assert text.count("==== ") == PLACES_MAX + 1 and "==== 60 times elsewhere" in text
    assert len(text) < PLACES_MAX * 10_000


def test_a_resume_keeps_what_was_there(wire: Wire, tmp_path: Path) -> None:
    FunctionReward("mine.py:score", score).score([ScoreItem("p", "p", "c", answer="1")])
    wire.errors.close()
    again = Wire(tmp_path)
    FunctionReward("mine.py:other", score).score([ScoreItem("p", "p", "c", answer="1")])
    text = again.text()
    assert text.index("mine.py:other") < text.index("before the last resume")
    assert text.index("before the last resume") < text.index("mine.py:score")
