"""What a run goes on from: whole and what the log committed, or mended, or one line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from dora_rl.core import events as ev
from dora_rl.observe.eventlog import FileLog
from dora_rl.types import UserError
from dora_rl.weights.levels import disk_level, make_durable, shared_level
from dora_rl.weights.mending import ready_newest
from dora_rl.weights.store import SharedMemoryWeightStore
from dora_rl.workers.engines import InstanceEngine
from dora_rl.workers.loads import Loads
from dora_rl.workers.worker import Setup
from tests.kit.inline_runs import config_of, events_of, proven, train


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.chmod(0o600)
    path.write_bytes(data)


class Sealed:
    """Version 1 in both levels; the log has committed it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.shared, self.disk = shared_level(folder / "shared"), disk_level(self.run_dir)
        for store in (self.shared.masters, self.shared.versions):
            store.publish(1, [("w", torch.ones(64))])
        make_durable(self.shared, self.disk, 1)
        self.commit(self.disk.versions.checksum(1))

    def commit(self, checksum: str) -> None:
        shutil.rmtree(self.run_dir / "events", ignore_errors=True)
        log = FileLog.create(self.run_dir / "events")
        log.append(0.0, ev.StepCommitted(0, checksum), [])
        log.close()

    def ready(self) -> list[str]:
        return ready_newest(self.shared, self.disk, self.run_dir, self.run_dir / "checkpoints")


@pytest.fixture
def sealed(tmp_path: Path) -> Sealed:
    return Sealed(tmp_path)


@pytest.mark.parametrize("part", ["weights", "learner/masters"])
def test_what_is_damaged_on_disk_is_restored_from_shared_memory(sealed: Sealed, part: str) -> None:
    assert sealed.ready() == []
    flip(sealed.run_dir / part / "00000001" / "model.safetensors")
    (note,) = sealed.ready()
    assert part in note and "restored from shared memory" in note
    assert sealed.ready() == [] and sealed.disk.holds_whole(1)


@pytest.mark.parametrize("part", ["weights", "learner/masters"])
@pytest.mark.parametrize("how", ["flipped", "cut", "emptied", "deleted"])
@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_whatever_becomes_of_a_file_on_disk_it_is_restored(
    sealed: Sealed, part: str, how: str, name: str
) -> None:
    path = sealed.run_dir / part / "00000001" / name
    data = path.read_bytes()
    path.chmod(0o600)
    if how == "flipped":
        flip(path)
    elif how == "deleted":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if how == "cut" else b"")
    sealed.ready()
    assert sealed.ready() == [] and sealed.disk.holds_whole(1)


@pytest.mark.parametrize("part", ["weights", "learner/masters"])
def test_without_a_whole_copy_one_line_says_what_is_left(sealed: Sealed, part: str) -> None:
    for folder in (sealed.run_dir / part, sealed.shared.versions.root / part.partition("/")[2]):
        flip(folder / "00000001" / "model.safetensors")
    with pytest.raises(UserError, match=f"{part}/00000001/model.safetensors .*restore it"):
        sealed.ready()


def test_a_version_that_the_log_did_not_commit_is_not_gone_on_from(sealed: Sealed) -> None:
    sealed.commit("f" * 64)
    with pytest.raises(UserError, match=r"weights/00000001.*the log committed ffffffffffff"):
        sealed.ready()


def test_a_version_in_shared_memory_must_be_the_one_of_the_log(sealed: Sealed) -> None:
    """Whole by its own digests, and not what was committed: as good as never sealed."""
    sealed.disk.forget_after(0)
    sealed.commit("f" * 64)
    (note,) = sealed.ready()
    assert "cannot be used" in note and "the log committed" in note
    assert not sealed.shared.versions.versions() and not sealed.disk.versions.versions()


class NoEngine:
    """An engine that loads what it is told to. Stands for `InstanceEngine`."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def load_layers(self, version: int, source: Any, verify: bool) -> Iterator[str]:
        yield "a layer"


def test_an_instance_loads_what_the_log_committed_and_nothing_else(tmp_path: Path) -> None:
    store = SharedMemoryWeightStore(tmp_path / "shared")
    checksum = store.publish(1, [("w", torch.ones(4))])
    config, said = config_of(tmp_path / "run"), list[ev.Loaded | ev.LoadFailed]()
    extra = {"weights_root": str(store.root), "device": "cpu"}
    setup = Setup("instance", "instance0", 0, "", "", str(tmp_path), config, extra)
    loads = Loads(setup, cast(InstanceEngine, NoEngine()), said.append)
    for attempt, committed in enumerate([checksum, "", "f" * 64]):
        loads.ask(1, attempt, committed)
        for _ in range(3):
            loads.go_on()
    assert [type(event) for event in said] == [ev.Loaded, ev.Loaded, ev.LoadFailed]
    assert isinstance(said[2], ev.LoadFailed) and "the log committed ffff" in said[2].reason


SYNC = {"mode": "sync", "num_steps": 3}


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    """Where nothing lies beside the newest version, a checkpoint is gone on from."""
    run_dir = tmp_path / "run"
    train(config_of(run_dir, orchestration=SYNC, checkpoint={"every_steps": 1}))
    shutil.rmtree(run_dir / "learner" / "masters" / "00000003")
    flip(run_dir / "checkpoints" / "step_000002" / "trainer" / "optimizer.safetensors")
    longer = config_of(run_dir, orchestration=SYNC | {"num_steps": 4})
    stop, lines = train(longer, resume=True)
    assert stop.done and proven(run_dir)
    (line,) = [line for line in lines if "step_000002" in line]
    assert "optimizer.safetensors is not the file that was saved; the one before it is used" in line
    assert any("version 3 has no masters beside it" in line for line in lines)


def test_weights_that_are_not_finite_stop_the_run_with_the_cause(tmp_path: Path) -> None:
    """Nothing of it is sealed, saved or loaded."""
    run_dir = tmp_path / "run"
    trainer = {"lr": 3e38}  # two such updates are more than a float32 holds
    config = config_of(run_dir, orchestration=SYNC, checkpoint={"every_steps": 1}, trainer=trainer)
    stop, _ = train(config)
    assert not stop.done and stop.reason.startswith("learner: ")
    assert "not finite" in stop.reason and "--resume goes on" in stop.reason
    found = events_of(run_dir)
    assert not any(isinstance(event, ev.LoadFailed) for event in found)
    for path in (run_dir / "weights").glob("*/model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())
    assert proven(run_dir)
