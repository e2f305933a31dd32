"""Both stores of a run: repaired from the disk, cleaned after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_rl.core.params import Params
from dora_rl.core.step import initial
from dora_rl.runtime.versions import Versions
from dora_rl.runtime.weights import WeightsError, copy_version


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
    versions.retire_all_but({0})
    assert list(versions.disk.versions()) == [0]
    versions.retire_all_but(set())
    assert list(versions.disk.versions()) == []


def test_a_new_run_begins_with_empty_stores(tmp_path: Path) -> None:
    versions = made(tmp_path, 0, 7)
    versions.clear()
    assert not versions.disk.versions() and not versions.shared.versions()
