"""The reward pool: who gets what, and what a lost or silent worker costs."""

from __future__ import annotations

import pytest

from dora_rl.controller.scoring import Failures, ScoringPool
from dora_rl.types import Prompt, RequestId, Trajectory
from dora_rl.workers.messages import Ready, Reward, Score, Scored
from dora_rl.workers.reward import read_items
from tests.kit.fakes import FakeWorkers


class Desk:
    """A pool of one worker and what it answered."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.workers = FakeWorkers()
        self.pool = ScoringPool(self.workers, 1, timeout_s, {})
        self.pool.start()
        self.workers.started.clear()
        self.answers: dict[str, tuple[float | None, str]] = {}

    def submit(self, *texts: str) -> None:
        for text in texts:

            def answer(reward: Reward, text: str = text) -> None:
                self.answers[text] = (reward.total, reward.error)

            num = len(text)
            ids = list(range(num))
            sample = Trajectory(RequestId(0, 0), 0, ids, [0.0] * num, [1] * num, text=text)
            self.pool.submit(Prompt(0, (1,), "p", "a"), sample, answer)

    def last_score(self) -> Score:
        message = self.workers.sent[-1][1]
        assert isinstance(message, Score)
        return message

    def last(self) -> list[str]:
        return [one.item.completion for one in self.last_score().items]

    def ready(self, at_once: int) -> None:
        self.pool.hear(self.workers.workers["reward0"], Ready(at_once))

    def reply(self, *rewards: float) -> None:
        scored = Scored(self.last_score().id, tuple(Reward(reward) for reward in rewards))
        self.pool.hear(self.workers.workers["reward0"], scored)


def test_one_at_a_time_unless_the_worker_asks_for_more() -> None:
    desk = Desk()
    desk.ready(1)
    desk.submit("a", "bb", "ccc")
    assert desk.last() == ["a"]
    desk.ready(2)  # a worker that waits for a judge
    assert desk.last() == ["bb", "ccc"]
    name = desk.workers.sent[-1][0]
    assert [item.completion_ids for item in read_items(desk.last_score())] == [(0, 1), (0, 1, 2)]
    desk.reply(1.0, 0.5)
    assert desk.answers == {"bb": (1.0, ""), "ccc": (0.5, "")}
    assert name == "reward0"


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_the_guilty_sample_alone_pays(how: str) -> None:
    desk = Desk(timeout_s=60.0 if how == "dies" else -1.0)
    desk.ready(8)
    desk.submit("first")
    desk.submit("good", "killer", "fine")
    desk.reply(1.0)
    assert desk.last() == ["good", "killer", "fine"]

    def fail() -> None:
        if how == "dies":
            desk.pool.lost("reward0")
        else:
            desk.pool.check_time()
        desk.ready(8)

    fail()
    assert desk.workers.started == ["reward0"]
    assert set(desk.answers) == {"first"}
    assert desk.last() == ["good"]
    desk.reply(1.0)
    assert desk.last() == ["killer"]
    fail()
    assert desk.answers["killer"][0] is None
    assert desk.last() == ["fine"]
    desk.reply(1.0)
    assert {text for text, (reward, _) in desk.answers.items() if reward == 1.0} == {
        "first",
        "good",
        "fine",
    }


def test_failures_are_told_at_once_and_then_ever_more_rarely() -> None:
    failures = Failures()
    told = [line for number in range(1, 501) for line in failures.add(f"reason {number}")]
    assert told == [
        "a reward failed: reason 1",
        "10 rewards failed, the last one: reason 10",
        "100 rewards failed, the last one: reason 100",
    ]
