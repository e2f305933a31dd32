"""Writing one sealed version: its tensors as they come, to one place or two in the same pass.

Never shows a version to anybody: the directories are the caller's, and private until it seals them.
What is written is described in `weights_file`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dora_rl.ports import Canary
from dora_rl.types import Version
from dora_rl.weights.format import (
    DTYPES,
    FORMAT,
    MANIFEST_FILE,
    NUM_HASH_THREADS,
    TENSORS_FILE,
    Manifest,
    TensorEntry,
    checksum_of,
    digest_of,
    seal_of,
)

if TYPE_CHECKING:
    from torch import Tensor

# Tensors are written as they come (a sharded trainer gathers one at a time), before the header is
# known. Room for about 500 names is left in front; more names cost one extra copy of the file.
HEADER_ROOM_BYTES = 64 * 1024
CHUNK_BYTES = 16 * 1024 * 1024
DTYPE_CODES = {name: code for code, name in DTYPES.items()}


class CopyFailed(Exception):
    """The second place that a version is written to could not take it; `error` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def write_sealed(
    directory: Path,
    version: Version,
    tensors: Iterable[tuple[str, Tensor]],
    canary: Canary | None,
    durable: bool,
    base: str = "",
    copy_to: Path | None = None,
) -> Manifest:
    """Write both files into `directory`, which must be empty and seen by nobody else yet; and the
    same into `copy_to`, another such directory, in the same pass."""
    with ExitStack() as stack:
        file = stack.enter_context((directory / TENSORS_FILE).open("w+b"))
        copy = stack.enter_context((copy_to / TENSORS_FILE).open("w+b")) if copy_to else None
        entries = _write_tensors(file, copy, tensors)
        header = _header_bytes(version, entries, HEADER_ROOM_BYTES)
        _write_header(file, header)
        if copy is not None:
            _tried(_write_header, copy, header)
        if durable:
            os.fsync(file.fileno())
    digest = hashlib.sha256(header).hexdigest()
    manifest = Manifest(version, checksum_of(entries), len(header), digest, entries, canary, base)
    write_manifest(directory, manifest, durable)
    if copy_to is not None:
        _tried(write_manifest, copy_to, manifest, False)
    return manifest


def _tried(write: Callable[..., object], *args: object) -> None:
    """What goes wrong with a copy is told apart from what goes wrong with the original."""
    try:
        write(*args)
    except OSError as error:
        raise CopyFailed(error) from error


def _write_header(file: BinaryIO, header: bytes) -> None:
    """In front of the tensors, which are moved if it is longer than what was left for it."""
    if len(header) > HEADER_ROOM_BYTES:
        _shift(file, HEADER_ROOM_BYTES, len(header))
    file.seek(0)
    file.write(header)
    file.flush()
    os.fchmod(file.fileno(), 0o444)


def _write_tensors(
    file: BinaryIO, copy: BinaryIO | None, tensors: Iterable[tuple[str, Tensor]]
) -> tuple[TensorEntry, ...]:
    entries: dict[str, TensorEntry] = {}
    pending: deque[tuple[str, Future[str], Future[None] | None]] = deque()
    begin = 0
    file.seek(HEADER_ROOM_BYTES)
    if copy is not None:
        copy.seek(HEADER_ROOM_BYTES)
    with (
        ThreadPoolExecutor(NUM_HASH_THREADS, thread_name_prefix="weights-hash") as pool,
        ThreadPoolExecutor(1, thread_name_prefix="weights-copy") as copier,
    ):
        for name, tensor in tensors:
            assert name not in entries, f"tensor {name!r} is published twice in one version"
            data = _bytes_of(tensor)
            # Hashing and writing release the interpreter lock: they run side by side. Few tensors
            # wait for their hash, since each is held in memory until then.
            copied = copier.submit(_tried, copy.write, data) if copy else None
            pending.append((name, pool.submit(digest_of, data), copied))
            file.write(data)
            end = begin + len(data)
            dtype = DTYPE_CODES.get(str(tensor.dtype).removeprefix("torch."))
            assert dtype is not None, f"tensor {name!r} has type {tensor.dtype}, not in safetensors"
            entries[name] = TensorEntry(name, dtype, tuple(tensor.shape), begin, end, "")
            begin = end
            if len(pending) > NUM_HASH_THREADS:
                _enter_digest(entries, pending)
        while pending:
            _enter_digest(entries, pending)
    return tuple(entries.values())


def _enter_digest(
    entries: dict[str, TensorEntry], pending: deque[tuple[str, Future[str], Future[None] | None]]
) -> None:
    name, digest, copied = pending.popleft()
    if copied is not None:
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
