"""Writing one sealed version: its tensors as they come, hashed and copied side by side.

To shared memory every tensor is copied in slices by several threads through a mapping: a file there
is memory, one thread takes longer to get it than to fill it, and writing to one file takes turns.
A mapping costs twice the work of a write, so that few cores write. To a disk tensors are written in
order, the disk is set to work at once (otherwise it would begin when all is written), and synced.

Never shows a version to anybody: the directory is the caller's, and private until it seals it. What
is written is described in `format`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dora_rl.model.checksum import checksum_of
from dora_rl.ports import Canary
from dora_rl.types import Version
from dora_rl.weights.format import (
    DTYPES,
    FORMAT,
    MANIFEST_FILE,
    NUM_THREADS,
    TENSORS_FILE,
    Manifest,
    TensorEntry,
    digest_of,
    seal_of,
)

if TYPE_CHECKING:
    from torch import Tensor

# Tensors are written as they come (a sharded trainer gathers one at a time), before the header is
# known. Room for about 500 names is left in front; more names cost one extra copy of the file.
HEADER_ROOM_BYTES = 64 * 1024
CHUNK_BYTES = 16 * 1024 * 1024
SLICE_BYTES = 32 * 1024 * 1024  # of a tensor, that one thread copies to shared memory at a time
WINDOW_BYTES = 1024 * 1024 * 1024  # of a file, mapped at a time
MAPPED_THREADS_MIN = 4
SYNC_FILE_RANGE_WRITE = 2  # <fcntl.h>
DTYPE_CODES = {name: code for code, name in DTYPES.items()}


def write_sealed(
    directory: Path,
    version: Version,
    tensors: Iterable[tuple[str, Tensor]],
    canary: Canary | None,
    durable: bool,
    base: str = "",
    threads: int = NUM_THREADS,
) -> Manifest:
    """Write both files into `directory`, which must be empty and seen by nobody else yet."""
    with (directory / TENSORS_FILE).open("w+b") as file:
        in_order = durable or threads < MAPPED_THREADS_MIN
        entries = _write_tensors(file, tensors, threads, in_order=in_order)
        header = _header_bytes(version, entries, HEADER_ROOM_BYTES)
        _write_header(file, header)
        if durable:
            os.fsync(file.fileno())
    digest = hashlib.sha256(header).hexdigest()
    manifest = Manifest(version, checksum_of(entries), len(header), digest, entries, canary, base)
    write_manifest(directory, manifest, durable)
    return manifest


def _write_header(file: BinaryIO, header: bytes) -> None:
    """In front of the tensors, which are moved if it is longer than what was left for it."""
    if len(header) > HEADER_ROOM_BYTES:
        _shift(file, HEADER_ROOM_BYTES, len(header))
    file.seek(0)
    file.write(header)
    file.flush()
    os.fchmod(file.fileno(), 0o444)


def _write_tensors(
    file: BinaryIO, tensors: Iterable[tuple[str, Tensor]], threads: int, *, in_order: bool
) -> tuple[TensorEntry, ...]:
    entries: dict[str, TensorEntry] = {}
    pending: deque[tuple[str, Future[str], list[Future[None]]]] = deque()
    begin, window = 0, Window(file.fileno())
    file.seek(HEADER_ROOM_BYTES)
    # Hashing, writing and copying release the interpreter lock: they run side by side. Few tensors
    # wait for theirs, since each is held in memory until then.
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-write") as pool:
        try:
            for name, tensor in tensors:
                assert name not in entries, f"tensor {name!r} is published twice in one version"
                data = _bytes_of(tensor)
                end = begin + len(data)
                digest, copies = pool.submit(digest_of, data), list[Future[None]]()
                if in_order:
                    file.write(data)
                    _start_writing(file.fileno(), HEADER_ROOM_BYTES + begin, len(data))
                else:
                    place = window.place(HEADER_ROOM_BYTES + begin, len(data))
                    copies = [
                        pool.submit(copy_slice, place, data, at)
                        for at in range(0, len(data), SLICE_BYTES)
                    ]
                pending.append((name, digest, copies))
                dtype = DTYPE_CODES.get(str(tensor.dtype).removeprefix("torch."))
                assert dtype is not None, (
                    f"tensor {name!r} has type {tensor.dtype}, not in safetensors"
                )
                entries[name] = TensorEntry(name, dtype, tuple(tensor.shape), begin, end, "")
                begin = end
                if len(pending) > 2 * threads:
                    _enter_digest(entries, pending)
            while pending:
                _enter_digest(entries, pending)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if not in_order:
        os.ftruncate(file.fileno(), HEADER_ROOM_BYTES + begin)
    return tuple(entries.values())


class Window:
    """The end of a growing file of shared memory, mapped in few large pieces: threads that map and
    unmap hold up those that copy."""

    def __init__(self, handle: int, num_bytes: int = WINDOW_BYTES) -> None:
        self._handle, self._num_bytes = handle, num_bytes
        self._begin = self._end = 0
        self._there: Any = None

    def place(self, start: int, size: int) -> Any:
        """Where these bytes of the file are, as an array. What is mapped is given back with the
        last array of it."""
        import numpy as np

        # Memory that is mapped and cannot be had would end the process: it is looked for before,
        # for this tensor and for what is still on its way to its place.
        room, end = os.fstatvfs(self._handle), start + size
        wanted = end - os.fstat(self._handle).st_blocks * 512
        if room.f_blocks and room.f_bavail * room.f_frsize < wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if end > self._end:
            self._begin = start - start % mmap.ALLOCATIONGRANULARITY
            self._end = max(end, self._begin + self._num_bytes)
            os.ftruncate(self._handle, self._end)  # takes no memory before it is written
            length = self._end - self._begin
            mapped = mmap.mmap(self._handle, length, offset=self._begin)
            self._there = np.frombuffer(mapped, dtype=np.uint8)
        return self._there[start - self._begin : end - self._begin]


def copy_slice(place: Any, data: memoryview, at: int) -> None:
    import numpy as np

    piece = data[at : at + SLICE_BYTES]
    np.copyto(place[at : at + len(piece)], np.frombuffer(piece, dtype=np.uint8))


def _start_writing(handle: int, start: int, size: int) -> None:
    """Sets the disk to work on what was just written, and does not wait for it. Where the system
    has no such call, `fsync` does it all."""
    with contextlib.suppress(AttributeError):
        call = ctypes.CDLL(None).sync_file_range
        call(handle, ctypes.c_int64(start), ctypes.c_int64(size), SYNC_FILE_RANGE_WRITE)


def _enter_digest(
    entries: dict[str, TensorEntry],
    pending: deque[tuple[str, Future[str], list[Future[None]]]],
) -> None:
    name, digest, copies = pending.popleft()
    for copied in copies:
        copied.result()
    entries[name] = replace(entries[name], digest=digest.result())


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _header_bytes(version: Version, entries: Sequence[TensorEntry], room: int) -> bytes:
    """Length and JSON header, padded so that the data starts at `room`, or at 64 bytes' alignment
    past it when the names do not fit."""
    table: dict[str, object] = {"__metadata__": {"format": "pt", "version": str(version)}}
    for t in entries:
        table[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [t.begin, t.end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    size = max(room, -(-(8 + len(text)) // 64) * 64)
    return struct.pack("<Q", size - 8) + text.ljust(size - 8)


def _shift(file: BinaryIO, start: int, new_start: int) -> None:
    """Move everything from `start` on to `new_start`; last chunk first, nothing is overwritten."""
    end = file.seek(0, os.SEEK_END)
    while end > start:
        size = min(CHUNK_BYTES, end - start)
        file.seek(end - size)
        chunk = file.read(size)
        file.seek(end - size + new_start - start)
        file.write(chunk)
        end -= size


def write_manifest(directory: Path, manifest: Manifest, durable: bool) -> None:
    body = asdict(manifest)
    with (directory / MANIFEST_FILE).open("w") as file:
        json.dump({"format": FORMAT, "seal": seal_of(body), "manifest": body}, file)
        file.flush()
        os.fchmod(file.fileno(), 0o444)
        if durable:
            os.fsync(file.fileno())
