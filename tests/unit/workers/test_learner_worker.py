"""The learner's process without a process: what is left when it ends between two of its writes."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dora_rl.core import events as ev
from dora_rl.weights.store import WeightsFull
from tests.kit.learner_lives import Run


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
    worker.run(controller)


def die_after(run: Run, step: int, **checkpoint: Any) -> None:
    """A life that trains one step and has no time to end well."""
    worker, controller = run.learner(**checkpoint)
    controller.train(step)
    controller.vanish()
    with pytest.raises(EOFError):
        worker.run(controller)


def no_room(*_: object) -> str:
    raise WeightsFull("no room")


def fail_to_seal(run: Run, monkeypatch: pytest.MonkeyPatch, step: int, **checkpoint: Any) -> None:
    """A life that saves the checkpoint of `step`, and ends before its version is sealed."""
    worker, controller = run.learner(**checkpoint)
    controller.train(step)
    with monkeypatch.context() as patch, pytest.raises(WeightsFull):
        patch.setattr(worker.start.publication.seals_to.versions, "seal", no_room)
        worker.run(controller)
    assert not controller.committed


def test_the_optimizer_is_kept_until_the_version_of_the_next_checkpoint_is_sealed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(run, 0)
    fail_to_seal(run, monkeypatch, 1)
    worker, controller = run.learner()
    assert (worker.version, worker.start.optimizer_version) == (1, 1)
    controller.train(1)
    controller.end()
    worker.run(controller)
    (told,) = [m.event for m in controller.committed]
    assert told.waited_s >= 0
    told = replace(told, waited_s=-1.0)
    assert told == ev.StepCommitted(1, worker.disk.checksum(2), incarnation=0, durable=1)
    assert run.checkpoints() == ["step_000001"]


def test_a_checkpoint_whose_version_was_never_sealed_is_not_taken_for_the_one_trained_later(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(run, 0)
    fail_to_seal(run, monkeypatch, 1)
    die_after(run, 1, every_steps=50)
    worker, _ = run.learner(every_steps=50)
    assert (worker.version, worker.start.optimizer_version) == (2, 1)


def test_only_time_without_groups_counts_as_waiting_for_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the copy of the moments after a step, and not the wait for a version that is sealed."""
    worker, controller = run.learner(every_steps=0)
    clock = [1000.0]
    made = SimpleNamespace(monotonic=lambda: clock[0], process_time=time.process_time)
    monkeypatch.setattr("dora_rl.workers.learner.time", made)
    worker.free_s = clock[0]
    ended, feed = worker.moments.step_ended, worker.learner.feed

    def step_ended(*args: Any, **named: Any) -> None:
        clock[0] += 100.0
        ended(*args, **named)

    def slow_feed(groups: Any) -> None:
        clock[0] += 30.0
        worker.shared.waited_s += 20.0  # of them for a version
        feed(groups)

    monkeypatch.setattr(worker.moments, "step_ended", step_ended)
    monkeypatch.setattr(worker.learner, "feed", slow_feed)
    for step in range(3):
        controller.train(step)
    controller.end()
    worker.run(controller)
    assert [m.event.waited_s for m in controller.committed] == [0.0, 0.0, 0.0]


def test_a_fault_in_the_next_step_does_not_undo_the_one_before(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, controller = run.learner()
    controller.train(0)
    controller.train(1, closed=False)
    store = worker.start.publication.seals_to.versions
    fed, original, faulty = threading.Event(), store.seal, worker.learner.feed

    def seal(directory: Path, version: int) -> None:
        assert version == 0 or fed.wait(60)
        original(directory, version)

    def feed(groups: Any) -> None:
        if worker.version == 1:
            fed.set()
            raise AssertionError("out of memory")
        faulty(groups)

    monkeypatch.setattr(store, "seal", seal)
    monkeypatch.setattr(worker.learner, "feed", feed)
    with pytest.raises(AssertionError, match="out of memory"):
        worker.run(controller)
    assert len(controller.committed) == 1 and list(worker.shared.versions()) == [0, 1]
    assert controller.durable == [0, 1] and max(worker.disk.versions()) == 1, "and it is on disk"


# -- between sealed and durable --------------------------------------------------------------------


class Died(BaseException):
    """The process is gone: no handler of an error sees it."""


def test_a_learner_joins_before_version_0_is_on_disk_and_a_lost_host_costs_nothing(
    run: Run,
) -> None:
    worker, controller = run.learner()
    seal, checksums = worker.disk.seal, list[str]()

    def late(directory: Path, version: int) -> None:
        while not controller.joined:
            threading.Event().wait(0.01)
        checksums.append(worker.shared.checksum(version))
        raise Died

    worker.disk.seal = late  # type: ignore[method-assign]
    controller.vanish()
    with pytest.raises((EOFError, Died)):
        worker.run(controller)
    with pytest.raises(Died):
        worker.sealing.wait()
    assert controller.joined[0].version == 0 and not worker.disk.versions()
    worker.disk.seal = seal  # type: ignore[method-assign]
    run.let_go()
    shutil.rmtree(run.folder / "shared")
    worker, controller = run.learner()
    controller.train(0)
    controller.end()
    worker.run(controller)
    assert [worker.disk.checksum(0)] == checksums and worker.version == 1


def die_at(run: Run, step: int, place: int) -> tuple[list[str], int]:
    """A life that trains one step and dies before the write `place` of its version to the disk.
    Returns the writes it came to and the version it had sealed."""
    worker, controller = run.learner(every_steps=0, state_every_s=1e9)
    writes: list[str] = []

    def watch(store: Any, name: str) -> None:
        seal = store.seal

        def counted(directory: Path, version: int) -> None:
            if version:
                writes.append(f"{name} {version}")
            if len(writes) > place:
                raise Died(name)
            seal(directory, version)

        store.seal = counted

    watch(worker.start.publication.seals_to.masters, "shared masters")
    watch(worker.start.publication.seals_to.versions, "shared version")
    watch(worker.start.exact, "masters")
    watch(worker.disk, "version")
    controller.train(step)
    controller.end()
    with contextlib.suppress(Died):
        worker.run(controller)
    return writes, max(worker.shared.versions())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", range(5))
def test_killed_before_each_write_of_a_version_nothing_is_lost_or_done_twice(
    tmp_path: Path, place: int, dtype: str
) -> None:
    """The four writes at a step's end, in their order: shared memory survives each death of the
    process, so whatever was sealed is on disk, bit for bit, when the next life has begun."""
    trainer = {"compute_dtype": dtype, "lr": 1e-4}
    whole, torn = (
        Run(make(tmp_path / "whole"), trainer=trainer),
        Run(make(tmp_path / "torn"), trainer=trainer),
    )
    with torch.backends.mkldnn.flags(enabled=False):
        writes, sealed = die_at(whole, 0, 99)
        assert writes == ["shared masters 1", "shared version 1", "masters 1", "version 1"]
        done, sealed = die_at(torn, 0, place)
        assert done == writes[: place + 1] and sealed == int(place >= 2)
        again, controller = torn.learner(every_steps=0, state_every_s=1e9)
        assert again.version == sealed == max(again.disk.versions())
        assert again.start.exact.versions() == [sealed] and not again.start.notes
        if not sealed:  # nobody has heard of it: the step is trained now
            controller.train(0)
        controller.end()
        again.run(controller)
        assert controller.joined[0].durable == controller.joined[0].version == sealed
        there, _ = whole.learner(every_steps=0, state_every_s=1e9)
    same = [(run.disk.checksum(1), run.start.exact.checksum(1)) for run in (there, again)]
    assert same[0] == same[1]
    whole.let_go()
    torn.let_go()


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("part", ["", "masters"])
def test_a_sealed_version_that_is_damaged_is_not_taken_and_told(run: Run, part: str) -> None:
    die_at(run, 0, 2)
    (path,) = (run.folder / "shared" / part / "00000001").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    again, _ = run.learner()
    assert again.version == 0 and again.disk.versions() == again.shared.versions() == [0]
    assert "version 1 in shared memory cannot be used" in again.start.notes[0]


def test_without_shared_memory_the_last_durable_version_is_gone_on_from(run: Run) -> None:
    die_at(run, 0, 2)
    shutil.rmtree(run.folder / "shared")
    again, controller = run.learner()
    assert again.version == 0 and again.start.exact.versions() == [0]
    controller.train(0)
    controller.end()
    again.run(controller)
    assert controller.durable == [1] and list(again.shared.versions()) == [0, 1]


def test_a_slow_disk_holds_up_the_next_seal_and_is_counted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 is trained while version 1 is on its way; version 2 is sealed when it is there."""
    worker, controller = run.learner(every_steps=0)
    seal, trained, sealed_with = worker.disk.seal, threading.Event(), []

    def slow(directory: Path, version: int) -> None:
        assert version != 1 or trained.wait(60)
        seal(directory, version)

    seal_shared, finish = (
        worker.start.publication.seals_to.versions.seal,
        worker.learner.finish_step,
    )

    def watched(directory: Path, version: int) -> None:
        sealed_with.append(max(worker.disk.versions(), default=-1))
        seal_shared(directory, version)

    def finished() -> dict[str, float]:
        metrics = finish()
        if worker.version == 1:
            threading.Timer(0.1, trained.set).start()
        return metrics

    monkeypatch.setattr(worker.disk, "seal", slow)
    monkeypatch.setattr(worker.start.publication.seals_to.versions, "seal", watched)
    monkeypatch.setattr(worker.learner, "finish_step", finished)
    for step in range(2):
        controller.train(step)
    controller.end()
    worker.run(controller)
    assert sealed_with == [-1, 0, 1] and controller.durable == [0, 1, 2]
    for message in controller.committed:
        times = message.metrics
        assert 0 <= times["time/durable_wait"] <= times["time/weight_sync"]
        assert 0 < times["time/publish_stall"] <= times["time/weight_sync"]
