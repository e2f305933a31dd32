"""Memory of retired versions is filled again, and never under the eyes of a reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.ports import Canary
from dora_rl.weights import writer
from dora_rl.weights.leftovers import SPARE
from dora_rl.weights.levels import disk_level, shared_level
from dora_rl.weights.sealing import WaitingStore
from dora_rl.weights.store import (
    DiskWeightStore,
    SharedMemoryWeightStore,
    VersionExists,
    VersionMissing,
    WeightsCorrupt,
    WeightsError,
    WeightsFull,
    copy_version,
)
from dora_rl.weights.writer_process import WriterProcess
from tests.kit.small_disk import needs_root, small_disk


def tensors(seed: int, size: int = 50_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.w": torch.randn(size, generator=generator).bfloat16(),
        "layers.0.odd": torch.arange(3, dtype=torch.uint8),
        "layers.1.w": torch.randn(7, size // 7, generator=generator),
        "scale": torch.tensor(float(seed)),
        "none": torch.empty(0, 4),
    }


def check(store: SharedMemoryWeightStore, version: int, seed: int, size: int = 50_000) -> None:
    sealed = SharedMemoryWeightStore(store.root).open(version)
    for name, tensor in tensors(seed, size).items():
        assert torch.equal(sealed.tensor(name), tensor), name


def inode(store: SharedMemoryWeightStore, version: int) -> int:
    return (store.root / f"{version:08d}" / "model.safetensors").stat().st_ino


def filled(store: Any, version: int, seed: int, num_bytes: int = 0, pin: Any = None) -> Any:
    draft = store.draft(version, num_bytes, pin)
    for name, tensor in tensors(seed).items():
        draft.room(name, tensor.shape, tensor.dtype).copy_(tensor)
    return draft


@pytest.fixture
def store(tmp_path: Path) -> SharedMemoryWeightStore:
    return SharedMemoryWeightStore(tmp_path / "store")


@pytest.mark.parametrize("kind", [SharedMemoryWeightStore, DiskWeightStore])
@pytest.mark.parametrize("num_bytes", [0, 5_000, 1_000_000])
def test_a_draft_is_the_version_that_was_filled_in(
    tmp_path: Path, kind: Any, num_bytes: int
) -> None:
    store, canary = kind(tmp_path / "store"), Canary((1, 2), (-0.5,))
    ready: list[list[int]] = []
    draft = filled(store, 3, seed=1, num_bytes=num_bytes)
    checksum = draft.seal(canary, "base", lambda: ready.append(list(store.versions())))
    assert ready == [[]], "nobody sees it before it may be seen"
    check(store, 3, 1)
    plain = SharedMemoryWeightStore(tmp_path / "plain").publish(
        3, tensors(1).items(), canary, "base"
    )
    assert checksum == plain == store.checksum(3) and store.open(3).canary == canary


def test_memory_of_a_retired_version_is_filled_again(store: SharedMemoryWeightStore) -> None:
    store.publish(0, tensors(0).items())
    used = inode(store, 0)
    store.retire(0)
    assert (store.root / SPARE).exists()
    filled(store, 1, seed=1).seal(None)
    assert inode(store, 1) == used and not (store.root / SPARE).exists()
    check(store, 1, 1)
    store.retire(1)
    for version, size in ((2, 50), (3, 90_000)):  # smaller, then larger than what lay there
        store.publish(version, tensors(version, size).items())
        assert inode(store, version) == used
        check(store, version, version, size)
        store.retire(version)


def test_what_somebody_reads_is_not_filled_again(store: SharedMemoryWeightStore) -> None:
    store.publish(0, tensors(0).items())
    held = store.open(0).tensor("layers.0.w")  # the mapping lives with the tensor
    store.retire(0)
    assert not (store.root / SPARE).exists()
    store.publish(1, tensors(1).items())
    assert torch.equal(held, tensors(0)["layers.0.w"])


def test_a_reader_in_another_process_counts_too(store: SharedMemoryWeightStore) -> None:
    store.publish(0, tensors(0).items())
    program = (
        "import sys; from dora_rl.weights.store import SharedMemoryWeightStore as S\n"
        "held = S(sys.argv[1]).map(0); print('reads', flush=True); sys.stdin.read()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert reader.stdin is not None and reader.stdout is not None
    assert reader.stdout.readline() == b"reads\n"
    store.retire(0)
    assert not (store.root / SPARE).exists()
    store.publish(1, tensors(1).items())
    reader.kill()  # a lock ends with whoever held it, however that ends
    reader.wait()
    store.retire(1)
    assert (store.root / SPARE).exists()


def test_a_reader_that_comes_too_late_finds_nothing(
    store: SharedMemoryWeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has opened the file, and before it says so the version is retired and filled again."""
    store.publish(0, tensors(0).items())
    stat, begun = os.fstat, list[Any]()

    def late(handle: int) -> os.stat_result:
        found = stat(handle)
        if not begun and found.st_ino == used:
            begun.append(None)
            store.retire(0)
            begun[0] = filled(store, 1, seed=1)
        return found

    used = inode(store, 0)
    monkeypatch.setattr(os, "fstat", late)
    with pytest.raises(VersionMissing):
        store.map(0)
    monkeypatch.undo()
    begun[0].seal(None)
    assert inode(store, 1) == used
    check(store, 1, 1)


def test_memory_that_is_still_looked_at_when_it_is_wanted_is_left_alone(
    store: SharedMemoryWeightStore,
) -> None:
    store.publish(0, tensors(0).items())
    used = inode(store, 0)
    handle = os.open(store.root / "00000000" / "model.safetensors", os.O_RDONLY)
    store.retire(0)
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_SH)  # between the retirement and the next version
    store.publish(1, tensors(1).items())
    assert inode(store, 1) != used
    os.close(handle)


def test_a_draft_that_is_given_up_leaves_nothing(store: SharedMemoryWeightStore) -> None:
    pinned: list[str] = []

    def pin(memory: Any) -> Any:
        pinned.append(f"{memory.nbytes} bytes")
        return lambda: pinned.append("undone")

    filled(store, 0, seed=0, num_bytes=1 << 20, pin=pin).discard()
    assert pinned == ["1032192 bytes", "undone"] and not store.versions()
    assert not list(store.root.glob(".new-*"))
    filled(store, 0, seed=2, num_bytes=1 << 20, pin=pin).seal(None)
    assert pinned[2:] == ["1032192 bytes", "undone"]
    check(store, 0, 2)
    again = filled(store, 5, seed=2)
    store.publish(5, tensors(1).items())
    with pytest.raises(VersionExists):
        again.seal(None)
    assert not list(store.root.glob(".new-*"))
    check(store, 5, 1)


@needs_root
def test_no_memory_for_a_draft_is_a_clear_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "2m"):
        store = SharedMemoryWeightStore(tmp_path / "small" / "store")
        with pytest.raises(WeightsFull):
            store.draft(0, 8 << 20)
        draft = store.draft(0, 1 << 19)
        with pytest.raises(OSError):
            draft.room("w", (8 << 20,), torch.uint8)
        draft.discard()
        store.publish(0, tensors(0, 1000).items())


# -- to the disk -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 40_000, (16 << 20) + 5000])
@pytest.mark.parametrize("direct", [True, False])
def test_a_copy_past_the_page_cache_is_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", None)
    shared = SharedMemoryWeightStore(tmp_path / "shared")
    disk = DiskWeightStore(tmp_path / "disk")
    shared.publish(0, [("w", torch.randint(256, (size,), dtype=torch.uint8))])
    copy_version(shared, disk, 0)
    assert disk.map(0).path.read_bytes() == shared.map(0).path.read_bytes()
    disk.open(0)


def test_damage_is_noticed_on_the_way_to_the_disk(tmp_path: Path) -> None:
    shared = SharedMemoryWeightStore(tmp_path / "shared")
    disk = DiskWeightStore(tmp_path / "disk")
    shared.publish(0, tensors(0).items())
    path = shared.map(0).path
    data = bytearray(path.read_bytes())
    path.chmod(0o644)
    for place in (20, len(data) - 1):  # header, tensor
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(WeightsCorrupt):
            copy_version(shared, disk, 0)
        assert not disk.versions() and not list(disk.root.glob(".new-*"))


# -- another process -------------------------------------------------------------------------------


def test_another_process_hashes_and_writes(tmp_path: Path) -> None:
    shared, disk = shared_level(tmp_path / "shared"), disk_level(tmp_path / "run")
    process = WriterProcess()
    try:
        path = tmp_path / "file"
        path.write_bytes(bytes(range(256)) * 100)
        ranges = [(0, 10), (10, 25_600), (5, 5)]
        assert process.digests(path, ranges) == writer.digests_of(path, ranges)
        with pytest.raises(OSError):
            process.digests(tmp_path / "none", ranges)
        shared.masters.publish(1, [("low:w", torch.arange(5))])
        shared.versions.digests = process.digests
        filled(shared.versions, 1, seed=4).seal(None)
        process.make_durable(shared.versions.root, tmp_path / "run", 1)
        check(disk.versions, 1, 4)
        assert disk.masters.checksum(1) == shared.masters.checksum(1)
        with pytest.raises(VersionMissing, match="version 2 is not in"):
            process.make_durable(shared.versions.root, tmp_path / "run", 2)
    finally:
        process.close()


def test_a_process_that_is_killed_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    process = WriterProcess()
    process._process.kill()
    with pytest.raises(WeightsError, match="has ended"):
        while True:
            process.digests(tmp_path / "none", [(0, 1)])


SIZE = 366_000  # what those tensors need, and a little more


class Card:
    """What a GPU would know: which memory was made known to it, and which of it is forgotten."""

    def __init__(self) -> None:
        self.pinned, self.forgotten = 0, 0

    def pin(self, memory: Any) -> Any:
        self.pinned += 1

        def undo() -> None:
            self.forgotten += 1

        return undo


def test_memory_that_a_gpu_knows_stays_known_between_versions(
    store: SharedMemoryWeightStore,
) -> None:
    card = Card()
    for version in range(5):
        filled(store, version, seed=version, num_bytes=SIZE, pin=card.pin).seal(None)
        check(store, version, version)
        store.retire(version)
    assert (card.pinned, card.forgotten) == (1, 0)


def test_memory_that_is_cut_is_made_known_again(store: SharedMemoryWeightStore) -> None:
    card = Card()
    filled(store, 0, seed=0, num_bytes=SIZE, pin=card.pin).seal(None)
    store.retire(0)
    draft = store.draft(1, 1, card.pin)  # smaller than what the GPU knows
    draft.room("one", (1,), torch.float32).fill_(3.0)
    known = card.forgotten
    draft.seal(None)
    assert card.forgotten == known + 1
    store.retire(1)
    filled(store, 2, seed=2, num_bytes=SIZE, pin=card.pin).seal(None)
    check(store, 2, 2)


def test_memory_that_somebody_else_wrote_to_is_made_known_again(
    store: SharedMemoryWeightStore,
) -> None:
    card = Card()
    for version in range(2):
        filled(store, version, seed=version, num_bytes=SIZE, pin=card.pin).seal(None)
        store.retire(version)
    before = card.pinned
    os.truncate(store.root / SPARE, 10)
    os.truncate(store.root / SPARE, SIZE)
    filled(store, 2, seed=2, num_bytes=SIZE, pin=card.pin).seal(None)
    check(store, 2, 2)
    assert card.pinned == before + 1


def test_memory_of_versions_that_are_gone_is_given_back(store: SharedMemoryWeightStore) -> None:
    card = Card()
    for version in (0, 1):
        filled(store, version, seed=version, num_bytes=SIZE, pin=card.pin).seal(None)
    for version in (0, 1):  # one is kept to be filled again, the other has no name
        store.retire(version)
    filled(store, 2, seed=2, num_bytes=SIZE, pin=card.pin).seal(None)
    assert (card.pinned, card.forgotten) == (2, 1)


def test_many_names_are_left_room_for_after_the_first_version(
    store: SharedMemoryWeightStore,
) -> None:
    """What lies behind the header is moved once, when nobody knew how long it would be."""
    names = [f"a_rather_long_name_of_a_tensor.{index:05d}" for index in range(1200)]
    starts = []
    for version in range(3):
        draft = store.draft(version)
        begun = draft.room("first", (4,), torch.float32).fill_(version).data_ptr()
        for index, name in enumerate(names):
            draft.room(name, (3,), torch.float32).fill_(version + index)
        draft.seal(None)
        sealed = SharedMemoryWeightStore(store.root).open(version)
        assert sealed.tensor(names[7]).tolist() == [version + 7] * 3
        starts.append((begun % 4096, sealed.manifest.data_start))
        store.retire(version)
    assert starts[0][1] > writer.HEADER_ROOM_BYTES
    assert {start for _, start in starts} == {starts[0][1]}


def test_a_reader_on_a_gpu_reads_where_the_gpu_knows_the_memory(tmp_path: Path) -> None:
    store, card = WaitingStore(tmp_path / "store"), Card()
    filled(store, 0, seed=0, num_bytes=SIZE, pin=card.pin).seal(None)
    sealed, plain = store.open(0), SharedMemoryWeightStore(store.root).open(0)
    known = store.pinned(sealed)
    assert known is not None and plain.pinned is None
    inside = range(known.ctypes.data, known.ctypes.data + known.nbytes)
    places = []
    for name, tensor in tensors(0).items():
        assert torch.equal(sealed.tensor(name), tensor)
        if tensor.numel():
            places.append(sealed.tensor(name).data_ptr() in inside)
    assert places == [True, True, False, False], "what the GPU does not know is read as ever"
