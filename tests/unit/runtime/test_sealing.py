"""Sealing beside the next step: in order, one at a time, and no fault is lost in the thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from dora_rl.weights.sealing import Sealing, WaitingStore
from dora_rl.weights.store import DiskWeightStore, VersionMissing, WeightsCorrupt, WeightsFull

TENSORS = [("a", torch.arange(6.0)), ("b", torch.ones(3, 5))]


class Stores:
    """A disk, shared memory, and a version 0 that only the disk has."""

    def __init__(self, path: Path) -> None:
        self.disk, self.shared = DiskWeightStore(path / "disk"), WaitingStore(path / "shared")
        self.sealing = self.shared.sealing = Sealing(self.disk, self.shared)
        self.checksum = self.disk.publish(0, TENSORS)
        self.told: list[tuple[str, bool]] = []

    def tell(self, checksum: str) -> None:
        self.told.append((checksum, list(self.shared.versions()) == [0]))


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)


def test_a_version_is_told_when_disk_and_shared_memory_have_it(stores: Stores) -> None:
    on_disk: Future[str] = Future()
    stores.sealing.begin(0, on_disk, stores.tell)
    assert stores.sealing.is_running() and not stores.told and not stores.shared.versions()
    on_disk.set_result(stores.checksum)
    stores.sealing.wait()
    assert stores.told == [(stores.checksum, True)] and not stores.sealing.is_running()
    assert stores.shared.checksum(0) == stores.checksum
    assert torch.equal(stores.shared.open(0).tensor("b"), torch.ones(3, 5))


def test_what_goes_wrong_in_the_thread_is_raised_where_the_learner_looks(stores: Stores) -> None:
    on_disk: Future[str] = Future()
    stores.sealing.begin(0, on_disk, stores.tell)
    on_disk.set_exception(WeightsFull("no room"))
    with pytest.raises(WeightsFull):
        while stores.sealing.is_running():
            threading.Event().wait(0.001)
    assert not stores.told and not stores.shared.versions()


def test_the_learner_waits_for_a_version_that_it_needs_itself(stores: Stores) -> None:
    with pytest.raises(VersionMissing):
        stores.shared.open(0)
    on_disk: Future[str] = Future()
    stores.sealing.begin(0, on_disk, stores.tell)
    threading.Timer(0.05, on_disk.set_result, (stores.checksum,)).start()
    assert stores.shared.open(0).checksum == stores.checksum


def test_damage_on_the_way_is_found_by_whoever_loads_the_version(stores: Stores) -> None:
    path = stores.disk.map(0).path
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.chmod(0o644)
    path.write_bytes(data)
    on_disk: Future[str] = Future()
    on_disk.set_result(stores.checksum)
    stores.sealing.begin(0, on_disk, stores.tell)
    with pytest.raises(WeightsCorrupt):
        stores.shared.open(0)


def test_a_version_that_is_there_is_opened_while_another_is_on_its_way(stores: Stores) -> None:
    on_disk: Future[str] = Future()
    stores.shared.publish(7, TENSORS)
    stores.sealing.begin(0, on_disk, stores.tell)
    should_it_wait = threading.Timer(120.0, on_disk.cancel)
    should_it_wait.start()
    assert stores.shared.open(7).version == 7 and stores.sealing.is_running()
    should_it_wait.cancel()
    assert stores.shared.waited_s == 0.0
    on_disk.set_result(stores.checksum)
    assert stores.shared.open(0).version == 0
