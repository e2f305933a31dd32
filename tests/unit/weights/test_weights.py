"""The weight store: sealed, atomic, verified, and usable after every kind of failure."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from dora_rl.config import WeightsConfig
from dora_rl.ports import Canary, SealedWeights, WeightStore
from dora_rl.weights import format as weights_file
from dora_rl.weights import writer as weights_writer
from dora_rl.weights.format import layer_order
from dora_rl.weights.store import (
    ROOT_FILE,
    SHARED_MEMORY,
    DiskWeightStore,
    SharedMemoryWeightStore,
    VersionExists,
    VersionMissing,
    WeightsCorrupt,
    WeightsFull,
    copy_version,
    remember_root,
    shared_memory_root,
)
from tests.kit.small_disk import needs_root, small_disk

torch.set_num_threads(1)


def some_tensors(seed: int = 0, layers: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.embed.weight": torch.randn(7, 5, generator=generator)}
    for i in range(layers):
        tensors[f"model.layers.{i}.q.weight"] = torch.randn(5, 5, generator=generator).bfloat16()
    tensors["model.norm.weight"] = torch.randn(5, generator=generator)
    return tensors


@pytest.fixture(params=[1, 8], ids=["one core", "many cores"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> SharedMemoryWeightStore:
    """On few cores tensors are written, on many they are copied through mappings."""
    return SharedMemoryWeightStore(tmp_path / "store", threads=request.param)


def test_what_is_published_is_what_is_read(store: SharedMemoryWeightStore) -> None:
    port: WeightStore = store
    tensors = some_tensors()
    canary = Canary((1, 2, 3), (-0.1, -2.25))
    checksum = port.publish(4, tensors.items(), canary)
    sealed: SealedWeights = SharedMemoryWeightStore(store.root).open(4)
    assert sealed.version == 4
    assert sealed.checksum == checksum == store.checksum(4)
    assert sealed.canary == canary
    assert list(sealed.names()) == list(tensors)
    for name, tensor in tensors.items():
        assert sealed.tensor(name).dtype == tensor.dtype
        assert torch.equal(sealed.tensor(name), tensor)


def test_tensors_are_views_and_writes_never_reach_the_store(
    store: SharedMemoryWeightStore,
) -> None:
    store.publish(0, some_tensors().items())
    sealed = store.open(0)
    name = "model.embed.weight"
    assert sealed.tensor(name).data_ptr() == sealed.tensor(name).data_ptr()
    sealed.tensor(name).zero_()
    fresh = store.open(0)
    fresh.verify()
    assert torch.equal(fresh.tensor(name), some_tensors()[name])


def test_every_type_shape_and_alignment(store: SharedMemoryWeightStore) -> None:
    tensors = {"byte": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    for code, name in weights_file.DTYPES.items():
        dtype = getattr(torch, name)
        tensors[code] = torch.arange(6).reshape(2, 3).to(dtype)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["strided"] = torch.arange(12.0).reshape(3, 4).t()
    store.publish(0, iter(tensors.items()))
    sealed = store.open(0)
    for name, tensor in tensors.items():
        read = sealed.tensor(name)
        assert read.shape == tensor.shape
        assert torch.equal(read.double(), tensor.double())


def test_pieces_of_a_file_are_mapped_in_turn(tmp_path: Path) -> None:
    """Windows of few pages, tensors that cross their ends, that fill several, that are empty."""
    sizes = [10, 5000, 4096, 0, 70_000, 1, 12_287, 4097]
    pieces = [os.urandom(size) for size in sizes]
    with (tmp_path / "file").open("w+b") as file:
        window, start = weights_writer.Memory(os.dup(file.fileno()), window_bytes=3 * 4096), 100
        places = []
        for piece in pieces:
            places.append((window.place(start, len(piece)), piece))
            start += len(piece)
        for place, piece in places:  # the earlier windows are still there
            weights_writer.copy_slice(place, memoryview(piece), 0)
        file.seek(100)
        assert file.read(start - 100) == b"".join(pieces)


def test_other_tools_read_the_file(store: SharedMemoryWeightStore, tmp_path: Path) -> None:
    tensors = some_tensors()
    store.publish(0, tensors.items())
    sealed = store.open(0)
    store.retire(0)  # an export works from the mapping, whatever happened to the store
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(sealed.file_bytes())
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "version": "0"}


def test_more_names_than_the_header_has_room_for(store: SharedMemoryWeightStore) -> None:
    tensors = {f"layers.{i}.{'w' * 100}": torch.full((3,), float(i)) for i in range(700)}
    store.publish(0, tensors.items())
    sealed = store.open(0)
    assert sealed.manifest.data_start > weights_writer.HEADER_ROOM_BYTES
    assert all(torch.equal(sealed.tensor(name), tensors[name]) for name in tensors)
    assert load_file(sealed.path).keys() == tensors.keys()


def test_a_version_is_published_once(store: SharedMemoryWeightStore) -> None:
    store.publish(0, some_tensors(1).items())
    with pytest.raises(VersionExists, match="version 0"):
        store.publish(0, some_tensors(2).items())
    assert torch.equal(
        store.open(0).tensor("model.norm.weight"), some_tensors(1)["model.norm.weight"]
    )


def test_two_writers_of_one_version_have_one_winner(store: SharedMemoryWeightStore) -> None:
    other = SharedMemoryWeightStore(store.root)
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        inside.set()
        assert go_on.wait(120)
        yield from some_tensors(1).items()

    lost: list[VersionExists] = []

    def publish_slowly() -> None:
        try:
            store.publish(0, slow())
        except VersionExists as error:
            lost.append(error)

    thread = threading.Thread(target=publish_slowly)
    thread.start()
    assert inside.wait(120)
    # The other writer is another process in real life, so it has another temporary name.
    (other.root / "00000000").mkdir()
    (other.root / "00000000" / "taken").touch()
    go_on.set()
    thread.join(120)
    assert len(lost) == 1
    assert not list(store.root.glob(".new-*"))


def test_retired_versions_stay_readable_where_mapped(store: SharedMemoryWeightStore) -> None:
    for version in range(3):
        store.publish(version, some_tensors(version).items())
    held = store.open(1)
    store.retire(1)
    assert list(store.versions()) == [0, 2]
    assert torch.equal(held.tensor("model.norm.weight"), some_tensors(1)["model.norm.weight"])
    with pytest.raises(VersionMissing, match=r"version 1 .*\[0, 2\]"):
        store.open(1)
    with pytest.raises(VersionMissing):
        store.retire(1)


def test_an_interrupted_retirement_is_finished_later(store: SharedMemoryWeightStore) -> None:
    store.publish(1, some_tensors().items())
    (store.root / "00000001").rename(store.root / ".old-00000001-1")  # and then it was killed
    SharedMemoryWeightStore(store.root)
    assert sorted(entry.name for entry in store.root.iterdir()) == [".lock"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_or_cut_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = SharedMemoryWeightStore(tmp_path_factory.mktemp("store"))
    store.publish(7, some_tensors(layers=1).items(), Canary((1, 2), (-1.5,)))
    name = data.draw(st.sampled_from(["model.safetensors", "manifest.json"]))
    path = store.root / "00000007" / name
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    path.chmod(0o644)
    if data.draw(st.booleans(), label="truncate"):
        path.write_bytes(content[:place])
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
    try:
        sealed = store.open(7)
    except WeightsCorrupt as error:
        assert "version 7" in str(error)
        assert name in str(error)
        return
    except weights_file.WeightsError as error:  # the flip made it another format number
        assert "has format" in str(error)
        return
    # Only white space or an equal spelling of the manifest may change unnoticed.
    assert name == "manifest.json"
    assert sealed.canary == Canary((1, 2), (-1.5,))


def test_damage_after_the_first_open_is_noticed_at_the_next(
    store: SharedMemoryWeightStore,
) -> None:
    store.publish(0, some_tensors().items())
    path = store.open(0).path
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(WeightsCorrupt, match=r"version 0.*tensor model\.norm\.weight"):
        store.open(0)
    path.unlink()
    with pytest.raises(WeightsCorrupt, match=r"model\.safetensors is gone"):
        store.open(0)


CRASH = """
import os, signal, sys, torch
from dora_rl.weights.store import SharedMemoryWeightStore
store = SharedMemoryWeightStore(sys.argv[1])
def tensors():
    yield "a", torch.ones(1000)
    if sys.argv[2] == "hang":
        print("half", flush=True); sys.stdin.readline()
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    yield "b", torch.ones(1000)
store.publish(5, tensors())
print(store.versions(), flush=True)
"""


def test_a_killed_writer_leaves_nothing(store: SharedMemoryWeightStore) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, str(store.root), "die"], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert list(store.versions()) == []
    assert list(store.root.glob(".new-*")), "the test must really interrupt a publication"
    again = SharedMemoryWeightStore(store.root)
    assert not list(store.root.glob(".new-*"))
    again.publish(5, some_tensors().items())
    assert list(again.versions()) == [5]


def test_cleaning_spares_a_living_writer(store: SharedMemoryWeightStore) -> None:
    command = [sys.executable, "-c", CRASH, str(store.root), "hang"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin and writer.stdout
        assert writer.stdout.readline() == "half\n"
        SharedMemoryWeightStore(store.root)
        assert list(store.versions()) == []
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "[5]\n"
    store.open(5).verify()


def test_no_room_is_a_clear_error_and_the_store_lives_on(store: SharedMemoryWeightStore) -> None:
    store.publish(0, some_tensors().items())

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(10)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WeightsFull, match=r"no room for version 1 in .*weights\.root"):
        store.publish(1, failing())
    assert list(store.versions()) == [0]
    assert not list(store.root.glob(".new-*"))
    store.retire(0)
    store.publish(1, some_tensors().items())
    store.open(1)


@needs_root
def test_a_really_full_shared_memory(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    with small_disk(mount, "1m"):
        store = SharedMemoryWeightStore(mount / "store")
        store.publish(0, [("a", torch.ones(100_000))])
        with pytest.raises(WeightsFull):
            store.publish(1, [(f"t{i}", torch.ones(100_000)) for i in range(4)])
        store.open(0).verify()
        store.retire(0)
        store.publish(1, [("a", torch.ones(100_000))])


def test_a_failing_source_is_not_swallowed(store: SharedMemoryWeightStore) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(10)
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        store.publish(1, failing())
    assert list(store.versions()) == []
    assert not list(store.root.glob(".new-*"))


def test_disk_and_back_keeps_the_checksum(store: SharedMemoryWeightStore, tmp_path: Path) -> None:
    disk = DiskWeightStore(tmp_path / "disk")
    checksum = store.publish(3, some_tensors().items(), Canary((1, 2), (-0.5,)))
    assert copy_version(store, disk, 3) == checksum
    assert copy_version(store, disk, 3) == checksum
    store.destroy()
    fresh = SharedMemoryWeightStore(store.root)
    assert copy_version(disk, fresh, 3) == checksum
    assert fresh.open(3).canary == Canary((1, 2), (-0.5,))
    other = SharedMemoryWeightStore(tmp_path / "other")
    other.publish(3, some_tensors(9).items())
    with pytest.raises(VersionExists, match="differs"):
        copy_version(other, disk, 3)


def test_the_checksum_names_the_weights_not_their_order(tmp_path: Path) -> None:
    tensors = list(some_tensors().items())
    one = SharedMemoryWeightStore(tmp_path / "one").publish(0, tensors)
    two = SharedMemoryWeightStore(tmp_path / "two").publish(9, reversed(tensors))
    assert one == two
    changed = [(name, tensor * 1.01) for name, tensor in tensors]
    assert SharedMemoryWeightStore(tmp_path / "three").publish(0, changed) != one


def test_names_come_layer_by_layer() -> None:
    names = ["embed", "layers.10.a", "layers.2.b", "layers.2.a", "norm", "head"]
    assert layer_order(names) == [
        "embed",
        "layers.2.b",
        "layers.2.a",
        "layers.10.a",
        "norm",
        "head",
    ]
    assert layer_order(["b", "a"]) == ["b", "a"]


def test_a_resumed_run_finds_its_root_again(tmp_path: Path) -> None:
    config, run_dir = WeightsConfig(), tmp_path / "run"
    run_dir.mkdir()
    one = shared_memory_root(config, run_dir)
    assert one != shared_memory_root(config, run_dir), "nobody knows it before"
    remember_root(run_dir, one)
    assert one == shared_memory_root(config, tmp_path / "x" / ".." / "run")
    assert (run_dir / ROOT_FILE).stat().st_mode & 0o777 == 0o600
    shutil.copytree(run_dir, tmp_path / "copy")
    assert one != shared_memory_root(config, tmp_path / "copy"), "a copy has its own"
    assert shared_memory_root(WeightsConfig(root="/fast"), tmp_path) == Path("/fast")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"name": 7}', '{"name": "../x", "run_dir": "HERE"}']
)
def test_a_damaged_memory_of_the_root_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ROOT_FILE).write_text(text.replace("HERE", str(tmp_path.resolve())))
    root = shared_memory_root(WeightsConfig(), tmp_path)
    assert root.parent == SHARED_MEMORY and len(root.name) > 16
