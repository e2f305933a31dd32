"""The reward pool: who gets what, and what a lost or silent worker costs."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from dora_rl.controller.scoring import Failures, ScoringPool
from dora_rl.types import Prompt
from dora_rl.workers.pool import WorkerPool
from dora_rl.workers.reward import read_items


class FakePool:
    """Remembers what was sent and who was restarted."""

    closing = False

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any], NDArray[Any]]] = []
        self.restarted: list[str] = []

    def send(self, name: str, kind: str, body: dict[str, Any], arrays: dict[str, Any]) -> None:
        assert kind == "score"
        self.sent.append((name, body, arrays["token_ids"]))

    def restart(self, name: str) -> None:
        self.restarted.append(name)


class Desk:
    """A pool of one worker and what it answered."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.workers = FakePool()
        self.pool = ScoringPool(cast("WorkerPool", self.workers), 1, timeout_s, {})
        self.answers: dict[str, tuple[float | None, str]] = {}

    def submit(self, *texts: str) -> None:
        for text in texts:

            def answer(reward: float | None, why: str, text: str = text) -> None:
                self.answers[text] = (reward, why)

            prompt = Prompt(0, "p", (1,), "a", {})
            ids = np.arange(len(text), dtype=np.int32)
            self.pool.submit(prompt, text, ids, "stop", answer)

    def last(self) -> list[str]:
        return [item["completion"] for item in self.workers.sent[-1][1]["items"]]

    def reply(self, *rewards: float) -> None:
        results = [{"reward": reward} for reward in rewards]
        self.pool.scored("reward0", {"id": self.workers.sent[-1][1]["id"], "results": results})


def test_one_at_a_time_unless_the_worker_asks_for_more() -> None:
    desk = Desk()
    desk.pool.ready("reward0", 1)
    desk.submit("a", "bb", "ccc")
    assert desk.last() == ["a"]
    desk.pool.ready("reward0", 2)  # a worker that waits for a judge
    assert desk.last() == ["bb", "ccc"]
    name, body, ids = desk.workers.sent[-1]
    assert [item.completion_ids for item in read_items(body["items"], ids)] == [(0, 1), (0, 1, 2)]
    desk.reply(1.0, 0.5)
    assert desk.answers == {"bb": (1.0, ""), "ccc": (0.5, "")}
    assert name == "reward0"


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_the_guilty_sample_alone_pays(how: str) -> None:
    desk = Desk(timeout_s=60.0 if how == "dies" else -1.0)
    desk.pool.ready("reward0", 8)
    desk.submit("first")
    desk.submit("good", "killer", "fine")
    desk.reply(1.0)
    assert desk.last() == ["good", "killer", "fine"]

    def fail() -> None:
        if how == "dies":
            desk.pool.lost("reward0")
        else:
            desk.pool.check_time()
        desk.pool.ready("reward0", 8)

    fail()
    assert desk.workers.restarted == ["reward0"]
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
