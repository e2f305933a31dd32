"""Both stores of a run: repaired from the disk, cleaned after a crash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.core.state import State
from dora_rl.core.step import initial
from dora_rl.observe.eventlog import FileLog
from dora_rl.ports import Canary
from dora_rl.types import UserError
from dora_rl.weights.leftovers import claim
from dora_rl.weights.proof import committed_checksums
from dora_rl.weights.store import (
    DiskWeightStore,
    SharedMemoryWeightStore,
    WeightsError,
    WeightsFull,
    copy_version,
)
from dora_rl.weights.versions import Versions
from tests.kit.small_disk import needs_root, small_disk


def made(tmp_path: Path, *numbers: int) -> Versions:
    versions = Versions(tmp_path / "run", tmp_path / "shared")
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


def test_a_copy_that_is_not_what_the_log_committed_is_made_again(tmp_path: Path) -> None:
    versions = made(tmp_path, 3)
    committed = versions.disk.checksum(3)
    versions.shared.retire(3)
    versions.shared.publish(3, [("w", torch.zeros(64))])  # whole, and another's
    assert versions.repair(3, committed)
    assert float(versions.shared.open(3).tensor("w")[0]) == 3.0
    versions.shared.retire(3)
    with pytest.raises(WeightsError, match="the log committed ffff"):
        versions.repair(3, "f" * 64)


def test_no_good_copy_is_an_error_and_a_version_to_come_is_none(tmp_path: Path) -> None:
    versions = made(tmp_path, 3)
    for store in ("shared", "run/weights"):
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
    versions = Versions(tmp_path / "run", tmp_path / "run" / "weights")
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


@pytest.mark.parametrize("num_names", [6, 1200], ids=["few names", "a header that needs more room"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [2, 8], ids="{} threads".format)
def test_shared_memory_and_disk_hold_the_same(
    tmp_path: Path, num_names: int, dtype: torch.dtype, threads: int
) -> None:
    """Slices that several threads copy, and the same written in order; small and large tensors."""
    given = [(f"model.layers.{i}.weight.{'x' * 40}", torch.randn(3)) for i in range(num_names)]
    given += [("large", torch.randn(3_000_001)), ("none", torch.empty(0)), ("odd", torch.ones(1))]
    given = [(name, tensor.to(dtype)) for name, tensor in given]
    shared = SharedMemoryWeightStore(tmp_path / "shared", threads=threads)
    checksum = shared.publish(2, given, Canary((1,), (-0.5,)), "base")
    disk = DiskWeightStore(tmp_path / "disk")
    assert copy_version(shared, disk, 2) == checksum == disk.checksum(2)
    for store in (SharedMemoryWeightStore(shared.root), DiskWeightStore(disk.root)):
        sealed = store.open(2)  # hashed
        assert all(torch.equal(sealed.tensor(name), tensor) for name, tensor in given)
        assert sealed.canary == Canary((1,), (-0.5,)) and sealed.base == "base"
    plain = load_file(shared.map(2).path)  # others read it too
    assert all(torch.equal(plain[name], tensor) for name, tensor in given)


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = SharedMemoryWeightStore(tmp_path / "shared")

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors()
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        store.publish(2, failing())
    assert not store.versions() and not [*store.root.glob(".new-*")]
    store.publish(2, tensors())


@needs_root
@pytest.mark.parametrize("size", [50_000, 600_000], ids=["written", "mapped"])
@pytest.mark.parametrize(
    "kind", [partial(SharedMemoryWeightStore, threads=8), DiskWeightStore], ids=["shared", "disk"]
)
def test_a_place_that_is_full_is_named(tmp_path: Path, kind: Any, size: int) -> None:
    """A mapping that there is no memory for would end the process: it is refused before."""
    small, kib = tmp_path / "small", 14 * size // 1024
    with small_disk(small, f"{kib}k"):
        store = kind(small)
        with pytest.raises(WeightsFull, match=f"no room for version 2 in {small}"):
            store.publish(2, [(f"t{i}", torch.ones(size)) for i in range(6)])
        assert not store.versions()
        store.publish(2, [("t", torch.ones(size))])


# -- a version that only shared memory has ---------------------------------------------------------


def sealed_only(tmp_path: Path, version: int) -> Versions:
    """Versions up to the one before are durable; this one is sealed."""
    versions = made(tmp_path, *range(version))
    for store in (versions.shared, SharedMemoryWeightStore(tmp_path / "shared" / "masters")):
        store.publish(version, tensors(version))
    return versions


def state_at(committed: int, on_disk: int) -> State:
    state = initial(Params(durable_behind=1))
    state.committed, state.on_disk = committed, on_disk
    return state


def test_a_version_that_is_sealed_and_not_durable_stays_for_the_resume(tmp_path: Path) -> None:
    versions = sealed_only(tmp_path, 3)
    versions.hold()
    assert versions.lost(state_at(3, 2), versions.shared.checksum(3)) is None
    assert versions.lost(state_at(3, 2), "f" * 64) == 2, "the log committed another"
    versions.keep_only(state_at(3, 2), wanted=[])
    assert 3 in versions.shared.versions()
    versions.release()
    assert 3 in SharedMemoryWeightStore(tmp_path / "shared").versions(), "an end cut short"


def test_what_another_run_has_sealed_in_the_same_place_is_not_taken(tmp_path: Path) -> None:
    """Both have the same `weights.root`; the other was killed with a newer version sealed."""
    os.close(claim(sealed_only(tmp_path, 3).shared.root, tmp_path / "run"))
    again = Versions(tmp_path / "run", tmp_path / "shared")
    assert list(again.shared.versions()) == [0, 1, 2, 3]
    other = Versions(tmp_path / "other", tmp_path / "shared")
    assert not other.shared.versions()
    assert not SharedMemoryWeightStore(tmp_path / "shared" / "masters").versions()


@pytest.mark.parametrize("what", ["gone", "damaged", "masters gone", "masters damaged"])
def test_a_version_that_is_lost_is_gone_back_over(tmp_path: Path, what: str) -> None:
    versions = sealed_only(tmp_path, 3)
    part = "masters" if "masters" in what else ""
    folder = tmp_path / "shared" / part / "00000003"
    if "gone" in what:
        shutil.rmtree(folder)
    else:
        damage(folder / "model.safetensors")
    assert versions.lost(state_at(3, 2)) == 2
    versions.rewind(2)
    assert list(versions.shared.versions()) == list(versions.disk.versions()) == [0, 1, 2]
    assert not SharedMemoryWeightStore(tmp_path / "shared" / "masters").versions()


def test_the_checksum_of_a_version_is_that_of_the_newest_lineage(tmp_path: Path) -> None:
    """`export`, `eval` and `serve` compare weights with it."""
    log = FileLog.create(tmp_path / "events")
    told = (ev.StepCommitted(0, "a"), ev.StepCommitted(1, "b"), ev.Rewound(1))
    for event in (*told, ev.StepCommitted(1, "c")):
        log.append(0.0, event, [])
    assert committed_checksums(tmp_path, range(4)) == {1: "a", 2: "c"}
    assert committed_checksums(tmp_path, [1]) == {1: "a"}
    assert committed_checksums(tmp_path, [3]) == {}


def test_a_run_without_the_version_to_go_back_to_is_refused(tmp_path: Path) -> None:
    versions = made(tmp_path, 0)
    with pytest.raises(UserError, match="no version 2 to go back to"):
        versions.lost(state_at(3, 2))


def test_a_damaged_version_that_is_only_wanted_is_removed(tmp_path: Path) -> None:
    versions = made(tmp_path, 1, 3)
    damage(tmp_path / "run" / "weights" / "00000001" / "model.safetensors")
    (note,) = versions.keep_only(state_at(3, 3), wanted=[1])
    assert "weights/00000001" in note and "not needed" in note
    assert list(versions.disk.versions()) == [3]


def test_a_log_that_ends_before_the_sealed_versions_is_refused(tmp_path: Path) -> None:
    versions = made(tmp_path, 2, 3)
    versions.check_log(state_at(3, 3))
    for committed in (1, 2):  # 3 may be new to a log of 2, but its step was never closed there
        with pytest.raises(UserError, match=f"events ends at version {committed} and version 3"):
            versions.check_log(state_at(committed, committed))
