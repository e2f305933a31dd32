"""The weights under LoRA versions: known by a checksum, and never mistaken for others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dora_rl.config import RunConfig
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.model.directory import read_spec
from dora_rl.model.random_weights import RandomAdapter
from dora_rl.setup.layout import plan_layout
from dora_rl.types import BaseDiffers
from dora_rl.weights.lora_base import base_checksum, whole
from dora_rl.weights.store import SealedFile, SharedMemoryWeightStore, copy_version
from dora_rl.workers.messages import Fatal, LoadSealed, Message, Told
from dora_rl.workers.pool import LocalProcesses, WorkerPool
from tests.kit.places import MODEL


def changed(folder: Path) -> Path:
    """The same model with one number of one tensor changed."""
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[0] += 1.0
    save_file(tensors, folder / "model.safetensors")
    return folder


def publish(root: Path, base: str) -> SharedMemoryWeightStore:
    adapter = RandomAdapter(read_spec(MODEL), seed=1, rank=4)
    store = SharedMemoryWeightStore(root)
    store.publish(0, [(name, adapter.tensor(name)) for name in adapter.names()], None, base)
    return store


def test_the_checksum_names_the_weights_and_not_their_files(tmp_path: Path) -> None:
    split = tmp_path / "split"
    shutil.copytree(MODEL, split)
    tensors = load_file(MODEL / "model.safetensors")
    (split / "model.safetensors").unlink()
    parts = {f"part{n}.safetensors": sorted(tensors)[n::2] for n in range(2)}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, split / file)
    where = {name: file for file, names in parts.items() for name in names}
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert base_checksum(split) == base_checksum(MODEL)
    assert base_checksum(changed(tmp_path / "other")) != base_checksum(MODEL)


def test_an_adapter_is_refused_on_another_base(tmp_path: Path) -> None:
    good = publish(tmp_path / "store", base_checksum(MODEL))
    copy = SharedMemoryWeightStore(tmp_path / "copy")
    copy_version(good, copy, 0)
    sealed: SealedFile = copy.open(0)
    assert sealed.base == base_checksum(MODEL), "a copy names it too"
    other = changed(tmp_path / "other")
    for base, fits in ((MODEL, True), (other, False)):
        engine = Engine(read_spec(MODEL), EngineOptions(versions_max=2, lora_rank=4))
        engine.load_base(base)
        if fits:
            engine.load(0, sealed)
            assert engine.versions() == (0,)
            whole(sealed, base)
            continue
        for use in (lambda e=engine: e.load(0, sealed), lambda b=base: whole(sealed, b)):
            with pytest.raises(BaseDiffers, match=r"^version 0 is an adapter for a base with .*$"):
                use()
        assert engine.versions() == ()


def test_an_instance_with_another_base_ends_with_one_line(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": str(changed(tmp_path / "other"))},
            "rollout": {"kv_bytes_max": 1 << 22, "num_instances": 1},
            "trainer": {"lora_rank": 4},
            "weights": {"root": str(tmp_path / "store")},
            "runtime": {"device": "cpu"},
        }
    )
    publish(tmp_path / "store", base_checksum(MODEL))
    (tmp_path / "journal").mkdir()
    layout = plan_layout(config, "cpu")
    pool = WorkerPool(config, tmp_path, LocalProcesses(tmp_path))
    pool.start("instance", "instance0", layout.instance_extra("instance0"))
    joined = pool.inbox.get(timeout=120).message
    assert isinstance(joined, Told) and isinstance(joined.event, ev.InstanceJoined)
    pool.send("instance0", LoadSealed(act.Load("instance0", 0, None)))
    said: list[Message] = [joined]
    for _ in range(60):  # reports, once a second
        envelope = pool.inbox.get(timeout=120)
        if envelope.message is None:
            break
        said.append(envelope.message)
    pool.end(10.0)
    fatal = said[-1]
    assert isinstance(fatal, Fatal) and fatal.ends_run
    assert "is an adapter for a base" in fatal.reason and "\n" not in fatal.reason
