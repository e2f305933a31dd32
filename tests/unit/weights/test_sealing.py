"""Sealed, then durable, beside the next step: in order, one behind at most, no fault is lost."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from dora_rl.weights.levels import disk_level, shared_level
from dora_rl.weights.sealing import Sealing, WaitingStore
from dora_rl.weights.store import VersionMissing, WeightsCorrupt, WeightsFull

TENSORS = [("a", torch.arange(6.0)), ("b", torch.ones(3, 5))]
LOW = [("low:a", torch.arange(6, dtype=torch.int16))]


class Levels:
    """Shared memory, a disk, and what was told when."""

    def __init__(self, path: Path) -> None:
        self.disk, self.shared = disk_level(path / "run"), shared_level(path / "shared")
        self.store = WaitingStore(path / "shared")
        self.sealing = self.store.sealing = Sealing(self.shared, self.disk)
        self.told: list[tuple[str, int, list[int], list[int]]] = []

    def seal(self, version: int) -> str:
        self.shared.masters.publish(version, LOW)
        return self.shared.versions.publish(version, TENSORS)

    def begin(self, version: int, sealed: Future[str]) -> Future[None]:
        return self.sealing.begin(
            version,
            sealed,
            lambda checksum: self.note("sealed", version),
            lambda: self.note("durable", version),
        )

    def note(self, what: str, version: int) -> None:
        shared, disk = self.shared.versions.versions(), self.disk.versions.versions()
        self.told.append((what, version, list(shared), list(disk)))


@pytest.fixture
def levels(tmp_path: Path) -> Levels:
    return Levels(tmp_path)


def test_a_version_is_told_when_it_is_sealed_and_again_when_it_is_durable(levels: Levels) -> None:
    sealed: Future[str] = Future()
    durable = levels.begin(0, sealed)
    assert levels.sealing.is_running() and not levels.told
    sealed.set_result(levels.seal(0))
    levels.sealing.wait()
    assert durable.done() and not levels.sealing.is_running()
    assert levels.told == [("sealed", 0, [0], []), ("durable", 0, [0], [0])]
    assert levels.disk.versions.checksum(0) == levels.shared.versions.checksum(0)
    assert levels.disk.masters.checksum(0) == levels.shared.masters.checksum(0)


def test_the_next_version_has_its_turn_when_the_one_before_is_durable(levels: Levels) -> None:
    """And what its seal waited for the disk is counted."""
    first: Future[str] = Future()
    durable = levels.begin(0, first)
    turn, came = levels.sealing.turn(), threading.Event()

    def wait() -> None:
        turn()
        levels.note("turn", 1)
        came.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not came.wait(0.05)
    first.set_result(levels.seal(0))
    waiting.join(60)
    assert durable.done() and [what for what, *_ in levels.told] == ["sealed", "durable", "turn"]
    assert levels.sealing.waited_s >= 0.05
    levels.sealing.turn()()


@pytest.mark.parametrize("where", ["seal", "disk"])
def test_what_goes_wrong_in_the_thread_is_raised_where_the_learner_looks(
    levels: Levels, where: str
) -> None:
    sealed: Future[str] = Future()
    levels.begin(0, sealed)
    if where == "seal":
        sealed.set_exception(WeightsFull("no room"))
    else:
        checksum = levels.seal(0)
        damage(levels.shared.versions.map(0).path)  # found when it is written to the disk
        sealed.set_result(checksum)
    turn = levels.sealing.turn()
    kind = WeightsFull if where == "seal" else WeightsCorrupt
    with pytest.raises(kind):
        turn()  # nothing is sealed on top of it
    with pytest.raises(kind):
        while levels.sealing.is_running():
            threading.Event().wait(0.001)
    assert not levels.disk.versions.versions() and "durable" not in [t[0] for t in levels.told]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.chmod(0o644)
    path.write_bytes(data)


def test_the_learner_waits_for_a_version_that_it_needs_itself_and_not_for_the_disk(
    levels: Levels,
) -> None:
    with pytest.raises(VersionMissing):
        levels.store.open(0)
    sealed, on_disk = Future[str](), threading.Event()

    def hold() -> None:
        on_disk.wait(60)

    levels.sealing.begin(0, sealed, lambda checksum: None, hold)
    threading.Timer(0.05, lambda: sealed.set_result(levels.seal(0))).start()
    assert levels.store.open(0).version == 0 and levels.sealing.is_running()
    assert levels.store.waited_s > 0.0
    on_disk.set()
    levels.sealing.wait()


def test_a_version_that_is_there_is_opened_while_another_is_on_its_way(levels: Levels) -> None:
    sealed: Future[str] = Future()
    levels.shared.versions.publish(7, TENSORS)
    levels.begin(0, sealed)
    should_it_wait = threading.Timer(120.0, sealed.cancel)
    should_it_wait.start()
    assert levels.store.open(7).version == 7 and levels.sealing.is_running()
    should_it_wait.cancel()
    assert levels.store.waited_s == 0.0
    sealed.set_result(levels.seal(0))
    levels.sealing.wait()


def test_others_make_way_while_a_version_is_on_its_way(levels: Levels) -> None:
    levels.sealing.make_way(60.0)  # none is: returns at once
    sealed: Future[str] = Future()
    levels.begin(0, sealed)
    levels.sealing.make_way(0.01)  # the time is over first
    assert not levels.told
    threading.Timer(0.05, lambda: sealed.set_result(levels.seal(0))).start()
    levels.sealing.make_way(60.0)
    assert [what for what, *_ in levels.told] == ["sealed", "durable"]
