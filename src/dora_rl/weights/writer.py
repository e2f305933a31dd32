"""Writing one sealed version: room for its tensors in a file, digests, header, manifest.

    draft = DraftFiles(directory, version, memory)   # in shared memory, where a file is memory
    draft.room("embed", shape, dtype)[:] = ...       # filled by whoever has the bytes
    draft.finish(canary, base, digests)              # hashed side by side; header and manifest

The memory may be that of a version that nobody reads any more: what the system has handed out once
is filled twice as fast. To a disk tensors are written in order, and a version that
is sealed elsewhere is copied as it is, past the page cache where the file system can.

Never shows a version to anybody: the directory is the caller's, and private until it seals it. What
is written is described in `format`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, TypeAlias

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
    SealedFile,
    TensorEntry,
    WeightsCorrupt,
    digest_of,
    seal_of,
)
from dora_rl.weights.private import held, lock_now

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Tensors are written as they come (a sharded trainer gathers one at a time), before the header is
# known. Room for about 500 names is left in front, in large versions for 2,000; more names cost one
# extra copy of the file, the first time.
HEADER_ROOM_BYTES = 64 * 1024
LARGE_HEADER_BYTES = 256 * 1024
LARGE_BYTES = 256 * 1024 * 1024  # a version from this size on is large
CHUNK_BYTES = 16 * 1024 * 1024
SLICE_BYTES = 32 * 1024 * 1024  # of a tensor, that one thread copies to shared memory at a time
WINDOW_BYTES = 1024 * 1024 * 1024  # of a growing file, mapped at a time
DIRECT_BYTES = 4096  # what the offsets and sizes of writes past the page cache are multiples of
DIRECT_THREADS = 2
SYNC_FILE_RANGE_WRITE, SYNC_FILE_RANGE_WAIT = 2, 7  # <fcntl.h>: begin; be done with it
PIN_REST = 64  # one part in so many of a memory, its end, is not made known to a GPU
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
DTYPE_CODES = {name: code for code, name in DTYPES.items()}
_libc = ctypes.CDLL(None)  # its calls release the interpreter lock

Range: TypeAlias = tuple[int, int]
"""Where bytes of a file begin and end."""
Pin: TypeAlias = Callable[[Any], Callable[[], None]]
"""Makes memory known to a GPU; what it returns undoes that."""
Digests: TypeAlias = Callable[[Path, Sequence[Range]], Sequence[str]]
"""The digests of parts of a file, whoever computes them."""


def digests_of(path: Path, ranges: Sequence[Range], threads: int = NUM_THREADS) -> list[str]:
    """Hash parts of a file side by side."""
    if not ranges:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = memoryview(mapped)
        try:
            with ThreadPoolExecutor(threads, thread_name_prefix="weights-hash") as pool:
                return list(pool.map(lambda part: _digest(data, part), ranges))
        finally:
            data.release()


def _digest(data: memoryview, part: Range) -> str:
    with data[part[0] : part[1]] as piece:
        return digest_of(piece)


def dtype_code(dtype: torch.dtype, name: str) -> str:
    code = DTYPE_CODES.get(str(dtype).removeprefix("torch."))
    assert code is not None, f"tensor {name!r} has type {dtype}, not in safetensors"
    return code


# -- shared memory --------------------------------------------------------------------------------


class Memory:
    """A file of shared memory, mapped: what it has at once, what it grows by in windows.

    `pin` makes what it has at the start known to a GPU, so that it is copied to at full speed. That
    takes longer than to fill it, so it stays known while the memory rests between two versions. All
    but its end is: versions differ in size by a few numbers, and what a GPU knows is not cut off.
    """

    def __init__(
        self,
        handle: int,
        pin: Pin | None = None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.handle, self._window_bytes = handle, window_bytes
        self._windows: list[tuple[int, int, Any]] = []  # begin, end, bytes as an array
        self._unpin: Callable[[], None] = lambda: None
        self._pinned_bytes = 0
        self._left = 0  # when it was last written to by us
        size = os.fstat(handle).st_size
        known = size - size // PIN_REST
        known -= known % mmap.PAGESIZE
        if pin is not None and known:
            self._unpin = pin(self._map(0, known))
            self._pinned_bytes = known
        elif size:
            self._map(0, size)

    @property
    def is_pinned(self) -> bool:
        return self._pinned_bytes > 0

    def pinned(self) -> Any:
        """What a GPU knows of it, as an array; None where that is nothing."""
        return self._windows[0][2] if self.is_pinned else None

    def place(self, start: int, size: int) -> Any:
        """These bytes of the file, as an array."""
        # Memory that is mapped and cannot be had would end the process: it is looked for before,
        # for this tensor and for what is still on its way to its place.
        check_room(self.handle, start + size - os.fstat(self.handle).st_blocks * 512)
        for begin, end, window in reversed(self._windows):
            if begin <= start and start + size <= end:
                return window[start - begin : start + size - begin]
        begin = start - start % mmap.ALLOCATIONGRANULARITY
        end = max(start + size, begin + self._window_bytes)
        return self._map(begin, end)[start - begin : start + size - begin]

    def _map(self, begin: int, end: int) -> Any:
        import numpy as np

        if os.fstat(self.handle).st_size < end:
            os.ftruncate(self.handle, end)  # takes no memory before it is written
        mapped = mmap.mmap(self.handle, end - begin, offset=begin)
        window = np.frombuffer(mapped, dtype=np.uint8)
        self._windows.append((begin, end, window))
        return window

    def cut(self, num_bytes: int) -> None:
        """The file has this size from here on."""
        if num_bytes < self._pinned_bytes:
            self._forget_pinned()
        os.ftruncate(self.handle, num_bytes)

    def rest(self) -> None:
        """Nobody writes to it for now."""
        if self.handle < 0:
            return
        if not self.is_pinned:
            self.close()
            return
        self._windows = self._windows[:1]
        self._left = os.fstat(self.handle).st_mtime_ns
        # What is still mapped somewhere shares the lock: it is given up, not only forgotten.
        fcntl.flock(self.handle, fcntl.LOCK_UN)

    def take(self) -> bool:
        """To be filled again. False where somebody still looks at it, or wrote to it meanwhile: a
        GPU would not know of memory that was given back and asked for anew."""
        free = self.handle >= 0 and lock_now(self.handle)
        return free and os.fstat(self.handle).st_mtime_ns == self._left

    def is_gone(self) -> bool:
        """Whether the file has no name any more."""
        return self.handle < 0 or os.fstat(self.handle).st_nlink == 0

    def close(self) -> None:
        if self.handle < 0:
            return
        self._forget_pinned()
        self._windows.clear()
        fcntl.flock(self.handle, fcntl.LOCK_UN)
        os.close(self.handle)
        self.handle = -1

    def _forget_pinned(self) -> None:
        self._unpin()
        self._unpin, self._pinned_bytes = (lambda: None), 0

    def __del__(self) -> None:
        self._forget_pinned()  # a GPU would take what comes to these addresses for this memory


def check_room(handle: int, num_bytes: int) -> None:
    room = os.fstatvfs(handle)
    if room.f_blocks and room.f_bavail * room.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def new_memory(path: Path, num_bytes: int = 0, pin: Pin | None = None) -> Memory:
    """A new file. `num_bytes` of memory are asked for at once, by several threads: the system takes
    longer to hand memory out than we take to fill it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if num_bytes:
            check_room(handle, num_bytes)
            os.ftruncate(handle, num_bytes)
            _populate(handle, num_bytes)
        return Memory(handle, pin)
    except BaseException:
        os.close(handle)
        raise


def spare_memory(path: Path, pin: Pin | None = None) -> Memory | None:
    """A file that a version lay in before; None where somebody still looks at it."""
    handle = os.open(path, os.O_RDWR)
    if lock_now(handle):
        return Memory(handle, pin)
    os.close(handle)
    return None


def _populate(handle: int, num_bytes: int) -> None:
    """Systems that cannot hand memory out ahead do it later."""
    import numpy as np

    with mmap.mmap(handle, num_bytes) as mapped:
        begin = np.frombuffer(mapped, dtype=np.uint8).ctypes.data

        def ask(at: int) -> None:
            size = min(SLICE_BYTES, num_bytes - at)
            _libc.madvise(ctypes.c_void_p(begin + at), ctypes.c_size_t(size), POPULATE_WRITE)

        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights-room") as pool:
            list(pool.map(ask, range(0, num_bytes, SLICE_BYTES)))


class DraftFiles:
    """The files of a version that is being written to shared memory."""

    def __init__(
        self,
        directory: Path,
        version: Version,
        memory: Memory,
        header_bytes: int = HEADER_ROOM_BYTES,
    ) -> None:
        """`header_bytes`: what is left for the header, in front of the tensors."""
        self.directory, self.version, self.memory = directory, version, memory
        self._start = header_bytes
        self._entries: dict[str, TensorEntry] = {}
        self._end = 0

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """The bytes of a tensor, as an array to be filled before `finish`."""
        assert name not in self._entries, f"tensor {name!r} is published twice in one version"
        size = math.prod(shape) * dtype.itemsize
        begin, self._end = self._end, self._end + size
        code = dtype_code(dtype, name)
        self._entries[name] = TensorEntry(name, code, tuple(shape), begin, self._end, "")
        return self.memory.place(self._start + begin, size)

    def finish(self, canary: Canary | None, base: str, digests: Digests) -> Manifest:
        """Hash what lies there, and describe it. The memory is given back."""
        start, entries = self._start, list(self._entries.values())
        self.memory.cut(start + self._end)
        ranges = [(start + entry.begin, start + entry.end) for entry in entries]
        found = digests(self.directory / TENSORS_FILE, ranges)
        digested = tuple(
            replace(entry, digest=digest) for entry, digest in zip(entries, found, strict=True)
        )
        with (self.directory / TENSORS_FILE).open("r+b") as file:
            parts = (self.directory, self.version, digested, canary, base)
            described = _describe(file, *parts, start=start)
        self.close()
        return described

    def close(self) -> None:
        self.memory.rest()


def _describe(
    file: BinaryIO,
    directory: Path,
    version: Version,
    entries: tuple[TensorEntry, ...],
    canary: Canary | None,
    base: str,
    *,
    start: int = HEADER_ROOM_BYTES,
    durable: bool = False,
) -> Manifest:
    """Header and manifest of tensors that are written from `start` on."""
    header = _header_bytes(version, entries, start)
    if len(header) > start:
        _shift(file, start, len(header))
    file.seek(0)
    file.write(header)
    _complete(file, durable)
    digest = hashlib.sha256(header).hexdigest()
    manifest = Manifest(version, checksum_of(entries), len(header), digest, entries, canary, base)
    write_manifest(directory, manifest, durable)
    return manifest


def fill(
    draft: DraftFiles, tensors: Iterable[tuple[str, Tensor]], threads: int = NUM_THREADS
) -> None:
    """Copy tensors of the host into a draft, in slices side by side. Few wait for their copies,
    since each is held in memory until then."""
    pending: deque[list[Future[None]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-write") as pool:
        try:
            for name, tensor in tensors:
                data = bytes_of(tensor)
                place = draft.room(name, tuple(tensor.shape), tensor.dtype)
                slices = range(0, len(data), SLICE_BYTES)
                pending.append([pool.submit(copy_slice, place, data, at) for at in slices])
                if len(pending) > 2 * threads:
                    _wait(pending.popleft())
            while pending:
                _wait(pending.popleft())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _wait(copies: Sequence[Future[None]]) -> None:
    for copied in copies:
        copied.result()


def copy_slice(place: Any, data: memoryview, at: int) -> None:
    import numpy as np

    piece = data[at : at + SLICE_BYTES]
    np.copyto(place[at : at + len(piece)], np.frombuffer(piece, dtype=np.uint8))


# -- a disk ---------------------------------------------------------------------------------------


def write_durable(
    directory: Path,
    version: Version,
    tensors: Iterable[tuple[str, Tensor]],
    canary: Canary | None,
    base: str = "",
    threads: int = NUM_THREADS,
    make_way: Callable[[], object] | None = None,
) -> Manifest:
    """Write both files into `directory`, which must be empty and seen by nobody else yet.
    `make_way`: called before every piece, which is on the disk before the next one but one."""
    with (directory / TENSORS_FILE).open("w+b") as file:
        entries = _write_in_order(Pieces(file, make_way), tensors, threads)
        return _describe(file, directory, version, entries, canary, base, durable=True)


def _write_in_order(
    pieces: Pieces, tensors: Iterable[tuple[str, Tensor]], threads: int
) -> tuple[TensorEntry, ...]:
    entries: dict[str, TensorEntry] = {}
    pending: deque[tuple[str, Future[str]]] = deque()
    begin = 0
    pieces.file.seek(HEADER_ROOM_BYTES)

    def enter_digest() -> None:
        name, digest = pending.popleft()
        entries[name] = replace(entries[name], digest=digest.result())

    # Hashing and writing release the interpreter lock: they run side by side.
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-write") as pool:
        try:
            for name, tensor in tensors:
                assert name not in entries, f"tensor {name!r} is published twice in one version"
                data = bytes_of(tensor)
                end = begin + len(data)
                pending.append((name, pool.submit(digest_of, data)))
                pieces.write(data, HEADER_ROOM_BYTES + begin)
                code = dtype_code(tensor.dtype, name)
                entries[name] = TensorEntry(name, code, tuple(tensor.shape), begin, end, "")
                begin = end
                if len(pending) > 2 * threads:
                    enter_digest()
            while pending:
                enter_digest()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return tuple(entries.values())


class Pieces:
    """A file that is written in order. The disk is set to work on every piece at once. Who makes
    way for others waits for it too, one piece behind, whichever tensor that was of: what lies in
    the page cache is written whether others need the disk or not."""

    def __init__(self, file: BinaryIO, make_way: Callable[[], object] | None) -> None:
        self.file, self._make_way = file, make_way
        self._before: Range | None = None  # where it begins, and its size

    def write(self, data: memoryview, start: int) -> None:
        for at in range(0, len(data), SLICE_BYTES):
            if self._make_way is not None:
                self._make_way()
            piece = data[at : at + SLICE_BYTES]
            self.file.write(piece)
            self.file.flush()
            _sync_range(self.file.fileno(), start + at, len(piece), SYNC_FILE_RANGE_WRITE)
            if self._make_way is not None and self._before is not None:
                _sync_range(self.file.fileno(), *self._before, SYNC_FILE_RANGE_WAIT)
            self._before = start + at, len(piece)


def _sync_range(handle: int, start: int, size: int, how: int) -> None:
    """Where the system has no such call, `fsync` does it all."""
    with contextlib.suppress(AttributeError):
        _libc.sync_file_range(handle, ctypes.c_int64(start), ctypes.c_int64(size), how)


def copy_durable(sealed: SealedFile, directory: Path, threads: int = NUM_THREADS) -> None:
    """Copy a sealed version byte for byte and sync it. Every byte is hashed on the way: what was
    damaged since it was sealed is not written."""
    path, data = directory / TENSORS_FILE, sealed.file_bytes()
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-hash") as pool:
        entries = sealed.manifest.tensors
        hashed = [(entry, pool.submit(digest_of, sealed.bytes_of(entry))) for entry in entries]
        write_past_cache(path, data)
        sealed.check_header()
        for entry, digest in hashed:
            if digest.result() != entry.digest:
                raise WeightsCorrupt(
                    f"version {sealed.version}: {sealed.path} changed after publication (tensor "
                    f"{entry.name}); not copied"
                )
    write_manifest(directory, sealed.manifest, durable=True)


def write_past_cache(path: Path, data: memoryview) -> None:
    """A new file of these bytes, on the disk when this returns. The page cache, which would only
    hold a second copy, is passed by where the file system lets us; `data` begins at a page."""
    with path.open("wb") as file:
        whole = len(data) - len(data) % DIRECT_BYTES
        done = whole if _write_direct(path, data[:whole]) else 0
        file.seek(done)
        file.write(data[done:])
        _complete(file, durable=True)


def _write_direct(path: Path, data: memoryview) -> bool:
    """False, and nothing that matters is written, where the file system cannot."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None or not data:
        return False
    starts = range(0, len(data), CHUNK_BYTES)
    try:
        with (
            held(os.open(path, os.O_WRONLY | flag)) as handle,
            ThreadPoolExecutor(DIRECT_THREADS, thread_name_prefix="weights-disk") as pool,
        ):
            list(pool.map(lambda at: _write_at(handle, data[at : at + CHUNK_BYTES], at), starts))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _write_at(handle: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:], at + done)


# -- both -----------------------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> memoryview:
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
        _complete(file, durable)


def _complete(file: IO[Any], durable: bool) -> None:
    """All of it is written: nobody writes to it again, and a disk has it."""
    file.flush()
    os.fchmod(file.fileno(), 0o444 if durable else 0o400)  # on a disk, the folders' rights count
    if durable:
        os.fsync(file.fileno())
