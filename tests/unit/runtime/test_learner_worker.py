"""The learner's process without a process: what is left when it ends between two of its writes."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dora_rl.config import RunConfig
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.runtime.layout import plan_layout
from dora_rl.runtime.learner_worker import LearnerWorker
from dora_rl.runtime.weights import DiskWeightStore, WeightsFull
from dora_rl.runtime.wire import Channel, Message, decode_event, encode_learner
from dora_rl.runtime.worker import Setup

TINY = Path(__file__).parents[3] / "recipes" / "models" / "tiny"


class Controller:
    """The other end of the channel: what it will say, and what it has heard."""

    def __init__(self) -> None:
        self.to_say: deque[Message] = deque()
        self.committed: list[Message] = []

    def poll(self, timeout_s: float) -> bool:
        if not self.to_say:
            threading.Event().wait(timeout_s)
        return bool(self.to_say)

    def receive(self) -> Message:
        return self.to_say.popleft()

    def send_event(self, event: ev.Event) -> None:
        pass

    def send(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "committed":
            self.committed.append(Message(kind, body))

    def train(self, step: int, *, closed: bool = True) -> None:
        feed = act.Feed(step, 0, step, step, (0, 1))
        body = {
            "action": encode_learner(feed),
            "batch_groups": 1,
            "updates": 1,
            "lengths": [2, 2],
            "segments": [[[step, 2]], [[step, 2]]],
            "rewards": [0.0, 1.0],
            "truncated": [False, False],
        }
        arrays = {
            "token_ids": np.array([5, 6, 7, 8], dtype=np.int32),
            "logprobs": np.full(4, -3.0, dtype=np.float32),
            "loss_mask": np.ones(4, dtype=np.uint8),
            "prompt_ids": np.array([3, 4], dtype=np.int32),
        }
        self.to_say.append(Message("order", body, arrays))
        if closed:
            close = encode_learner(act.CloseStep(step, (step,)))
            self.to_say.append(Message("order", {"action": close}))

    def end(self) -> None:
        self.to_say.append(Message("end", {}))


class Run:
    """A run directory and the lives of its learner, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    def learner(self, **checkpoint: Any) -> tuple[LearnerWorker, Controller]:
        self.let_go()
        config = RunConfig.model_validate(
            {
                "model": {"path": str(TINY)},
                "orchestration": {"batch_groups": 1, "num_steps": 100},
                "rollout": {"num_samples": 2},
                "checkpoint": {"every_steps": 1, "keep": 1, **checkpoint},
                "weights": {"root": str(self.folder / "shared")},
                "runtime": {"device": "cpu", "run_dir": str(self.folder)},
            }
        )
        extra = plan_layout(config, "cpu").learner_extra("learner", self.folder / "meeting")
        setup = Setup("learner", "learner", 0, "", "00", str(self.folder), config, extra)
        controller = Controller()
        worker = LearnerWorker(setup, cast(Channel, controller))
        self._lock = worker.lock
        return worker, controller

    def let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.let_go()


def live(run: Run, step: int, **checkpoint: Any) -> None:
    """A whole life that trains one step."""
    worker, controller = run.learner(**checkpoint)
    controller.train(step)
    controller.end()
    worker.run()


def no_room(*_: object) -> str:
    raise WeightsFull("no room")


def fail_to_seal(run: Run, monkeypatch: pytest.MonkeyPatch, step: int, **checkpoint: Any) -> None:
    """A life that saves the checkpoint of `step`, and ends before its version is sealed."""
    worker, controller = run.learner(**checkpoint)
    controller.train(step)
    with monkeypatch.context() as patch, pytest.raises(WeightsFull):
        patch.setattr(DiskWeightStore, "publish", no_room)
        worker.run()
    assert not controller.committed


def test_the_optimizer_is_kept_until_the_version_of_the_next_checkpoint_is_sealed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(run, 0)
    fail_to_seal(run, monkeypatch, 1)
    worker, controller = run.learner()
    assert (worker.version, worker.optimizer_version) == (1, 1)
    controller.train(1)
    controller.end()
    worker.run()
    assert [decode_event(m.body["event"]) for m in controller.committed] == [
        ev.StepCommitted(1, worker.disk.checksum(2), incarnation=0)
    ]
    assert run.checkpoints() == ["step_000001"]


def test_a_checkpoint_whose_version_was_never_sealed_is_not_taken_for_the_one_trained_later(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(run, 0)
    fail_to_seal(run, monkeypatch, 1)
    live(run, 1, every_steps=50)
    worker, _ = run.learner(every_steps=50)
    assert (worker.version, worker.optimizer_version) == (2, 1)


def test_a_fault_in_the_next_step_does_not_undo_the_one_before(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, controller = run.learner()
    controller.train(0)
    controller.train(1, closed=False)
    fed, original, faulty = threading.Event(), DiskWeightStore.publish, worker.learner.feed

    def publish(store: DiskWeightStore, version: int, *more: Any) -> str:
        assert version == 0 or fed.wait(60)
        return original(store, version, *more)

    def feed(groups: Any) -> None:
        if worker.version == 1:
            fed.set()
            raise AssertionError("out of memory")
        faulty(groups)

    monkeypatch.setattr(DiskWeightStore, "publish", publish)
    monkeypatch.setattr(worker.learner, "feed", feed)
    with pytest.raises(AssertionError, match="out of memory"):
        worker.run()
    assert len(controller.committed) == 1 and list(worker.shared.versions()) == [0, 1]
