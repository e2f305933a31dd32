"""Both stores of a run: repaired from the disk, cleaned after a crash."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_disk import needs_root, small_disk

from dora_rl.core.params import Params
from dora_rl.core.step import initial
from dora_rl.ports import Canary
from dora_rl.weights.store import (
    SharedMemoryWeightStore,
    VersionExists,
    WeightsError,
    WeightsFull,
    copy_version,
)
from dora_rl.weights.versions import MirroredDisk, Versions, share


def made(tmp_path: Path, *numbers: int) -> Versions:
    versions = Versions(tmp_path / "disk", tmp_path / "shared")
    for number in numbers:
        versions.disk.publish(number, [("w", torch.full((64,), float(number)))])
        copy_version(versions.disk, versions.shared, number)
    return versions


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_damaged_copy_is_made_again(tmp_path: Path) -> None:
    versions = made(tmp_path, 3)
    assert not versions.repair(3)
    damage(tmp_path / "shared" / "00000003" / "model.safetensors")
    assert versions.repair(3)
    assert not versions.repair(3)
    versions.shared.retire(3)
    assert versions.repair(3)
    assert float(versions.shared.open(3).tensor("w")[0]) == 3.0


def test_no_good_copy_is_an_error_and_a_version_to_come_is_none(tmp_path: Path) -> None:
    versions = made(tmp_path, 3)
    for store in ("shared", "disk"):
        damage(tmp_path / store / "00000003" / "model.safetensors")
    with pytest.raises(WeightsError):
        versions.repair(3)
    assert not versions.repair(4)


def test_after_a_crash_only_what_is_needed_stays(tmp_path: Path) -> None:
    versions = made(tmp_path, 0, 1, 2)
    state = initial(Params())
    state.committed = 1  # version 2 was sealed before its log record
    state.versions.clear()
    versions.keep_only(state, wanted=[])
    assert list(versions.disk.versions()) == list(versions.shared.versions()) == [1, 2]


def test_a_version_waits_for_its_evaluation(tmp_path: Path) -> None:
    versions = made(tmp_path, 0, 1)
    versions.to_retire = {0, 1}
    assert versions.retire_all_but({0}) == {0, 1}
    assert list(versions.disk.versions()) == [0]
    assert list(versions.shared.versions()) == []  # instances need it no more
    assert versions.retire_all_but(set()) == set()
    assert list(versions.disk.versions()) == []


def test_where_both_stores_are_one_place_a_pinned_version_stays(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "disk", tmp_path / "disk")
    versions.disk.publish(0, [("w", torch.zeros(4))])
    versions.to_retire = {0}
    versions.retire_all_but({0})
    assert list(versions.disk.versions()) == [0]


def test_a_new_run_begins_with_empty_stores(tmp_path: Path) -> None:
    versions = made(tmp_path, 0, 7)
    versions.clear()
    assert not versions.disk.versions() and not versions.shared.versions()


def tensors(number: int = 0) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{i}", torch.full((50_000,), float(i + number))) for i in range(6)]


def mirrored(tmp_path: Path) -> tuple[MirroredDisk, SharedMemoryWeightStore]:
    shared = SharedMemoryWeightStore(tmp_path / "shared")
    return MirroredDisk(tmp_path / "disk", shared), shared


def files_of(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "00000002").iterdir()}


@pytest.mark.parametrize("num_names", [6, 1200], ids=["few names", "a header that needs more room"])
def test_the_learner_publishes_the_same_files_to_disk_and_shared_memory(
    tmp_path: Path, num_names: int
) -> None:
    disk, shared = mirrored(tmp_path)
    given = [(f"model.layers.{i}.weight.{'x' * 40}", torch.ones(3) * i) for i in range(num_names)]
    checksum = disk.publish(2, given, Canary((1,), (-0.5,)), "base")
    assert files_of(disk.root) == files_of(shared.root)
    assert checksum == shared.checksum(2) == disk.checksum(2)
    sealed = SharedMemoryWeightStore(shared.root).open(2)  # hashed
    assert {name: float(t[0]) for name, t in sealed.tensors()} == {n: float(t[0]) for n, t in given}
    assert sealed.canary == Canary((1,), (-0.5,)) and sealed.base == "base"
    assert share(disk, shared, 2) == checksum


def test_shared_memory_shows_a_version_only_when_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, shared = mirrored(tmp_path)
    sealed, seal = [], SharedMemoryWeightStore._seal

    def watched(store: SharedMemoryWeightStore, *args: Any) -> None:
        sealed.append((store.root, list(disk.versions()), list(shared.versions())))
        seal(store, *args)

    monkeypatch.setattr(SharedMemoryWeightStore, "_seal", watched)
    disk.publish(2, tensors())
    assert sealed == [(disk.root, [], []), (shared.root, [2], [])]


def test_a_source_that_fails_leaves_nothing_in_either(tmp_path: Path) -> None:
    disk, shared = mirrored(tmp_path)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors()
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        disk.publish(2, failing())
    assert not disk.versions() and not shared.versions()
    assert not [*disk.root.glob(".new-*"), *shared.root.glob(".new-*")]
    disk.publish(2, tensors())


def test_the_controller_may_have_shared_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, shared = mirrored(tmp_path)
    seal = SharedMemoryWeightStore._seal

    def raced(store: SharedMemoryWeightStore, directory: Path, version: int) -> None:
        seal(store, directory, version)
        if store is disk:
            shutil.copytree(disk.root / "00000002", shared.root / "00000002")

    monkeypatch.setattr(SharedMemoryWeightStore, "_seal", raced)
    checksum = disk.publish(2, tensors())
    assert shared.checksum(2) == checksum
    with pytest.raises(VersionExists):
        disk.publish(2, tensors(1))


def test_one_place_for_both(tmp_path: Path) -> None:
    """A machine without shared memory."""
    shared = SharedMemoryWeightStore(tmp_path / "disk")
    disk = MirroredDisk(tmp_path / "disk", shared)
    checksum = disk.publish(2, tensors())
    assert share(disk, shared, 2) == checksum


@needs_root
@pytest.mark.parametrize("small", ["disk", "shared"])
def test_the_place_that_is_full_is_named(tmp_path: Path, small: str) -> None:
    with small_disk(tmp_path / small, "700k"):
        disk, shared = mirrored(tmp_path)
        with pytest.raises(WeightsFull, match=f"no room for version 2 in {tmp_path / small}"):
            disk.publish(2, tensors())
        assert not disk.versions() and not shared.versions()
        disk.publish(2, tensors()[:1])
        assert list(shared.versions()) == [2]
