"""The learner's process without a process: what is left when it ends between two of its writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from learner_lives import Run

from dora_rl.core import events as ev
from dora_rl.io.wire import decode_event
from dora_rl.weights.store import DiskWeightStore, WeightsFull


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


def die_after(run: Run, step: int, **checkpoint: Any) -> None:
    """A life that trains one step and has no time to end well."""
    worker, controller = run.learner(**checkpoint)
    controller.train(step)
    controller.vanish()
    with pytest.raises(EOFError):
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
    die_after(run, 1, every_steps=50)
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
