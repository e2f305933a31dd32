"""An append-only file of checked records that survives a crash at any byte.

Never knows what a record means. Invariant: what `read` yields is an exact prefix of what was
appended; a record that was appended to the end is in it. A torn tail (the writer died) is cut off;
damage in the middle is an error that names the place, since dropping what follows would lose rows.

    file   = magic, record, record, …
    record = body length | CRC of that length | CRC of the body | body
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

MAGIC = b"dora-table-1\n"
RECORD = struct.Struct("<III")
LENGTH = struct.Struct("<I")
# Smaller records are joined and written by one call.
JOIN_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = (1 << 32) - 1
# A file this much larger than its live rows, and than it was after its last rewriting, is mostly
# operations of the past.
REWRITE_BYTES_MIN = 4 << 20
REWRITE_RATIO = 4


class TableError(Exception):
    """The table refused an operation; it is as it was before."""


class TableCorrupt(TableError):
    """The file is damaged at a place that no crash explains."""


class TableLog:
    """Open for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.num_bytes = os.lseek(self._file, 0, os.SEEK_END)
        if self.num_bytes < len(MAGIC):
            self._cut(0)
            _write_all(self._file, [MAGIC])
            self.num_bytes = len(MAGIC)
        self._rewritten_bytes = 0
        self._synced_bytes = 0

    def read(self) -> Iterator[memoryview]:
        """The body of every record; a torn tail is cut off the file."""
        with self.path.open("rb") as file:
            content = memoryview(file.read())
        if bytes(content[: len(MAGIC)]) != MAGIC:
            raise TableCorrupt(f"{self.path} is not a table of this program")
        place = len(MAGIC)
        while place < len(content):
            end = self._record_end(content, place)
            if end is None:
                self._cut(place)
                return
            yield content[place + RECORD.size : end]
            place = end

    def _record_end(self, content: memoryview, place: int) -> int | None:
        """Where the record ends; None if a crash left it incomplete."""
        rest = len(content) - place
        if rest < RECORD.size:
            return None
        length, length_crc, body_crc = RECORD.unpack_from(content, place)
        if zlib.crc32(LENGTH.pack(length)) != length_crc:
            # A power cut may leave a tail of zeros where the file had grown already.
            if not any(content[place:]):
                return None
            raise TableCorrupt(f"{self.path} is damaged at byte {place}; restore it from a copy")
        end = place + RECORD.size + length
        if end > len(content):
            return None
        if zlib.crc32(content[place + RECORD.size : end]) != body_crc:
            if end == len(content):
                return None
            raise TableCorrupt(f"{self.path} is damaged at byte {place}; restore it from a copy")
        return end

    def append(self, body: Sequence[Any]) -> None:
        """All or nothing: after a failed write the file is cut back to where it was."""
        try:
            written = _write_all(self._file, _record(body))
        except OSError as error:
            self._cut(self.num_bytes)
            reason = f"cannot write {self.path} ({error.strerror}); free some room"
            raise TableError(reason) from error
        self.num_bytes += written

    def sync(self) -> None:
        if self.num_bytes != self._synced_bytes:
            os.fdatasync(self._file)
            self._synced_bytes = self.num_bytes

    def rewrite(self, bodies: Iterable[Sequence[Any]]) -> None:
        """Replace everything by these records, atomically, and go on appending after them."""
        write_log(self.path, bodies)
        old = self._file
        self._file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self.num_bytes = os.lseek(self._file, 0, os.SEEK_END)
        self._rewritten_bytes = self._synced_bytes = self.num_bytes
        os.close(old)

    def mostly_old(self, live_bytes: int) -> bool:
        """Time to rewrite, so that reading the file does not take longer the longer a run is."""
        live_bytes = max(live_bytes, self._rewritten_bytes)
        return self.num_bytes > REWRITE_BYTES_MIN + REWRITE_RATIO * live_bytes

    def close(self) -> None:
        os.close(self._file)

    def _cut(self, size: int) -> None:
        os.ftruncate(self._file, size)
        os.lseek(self._file, size, os.SEEK_SET)
        self.num_bytes = size


def whole_records(path: Path) -> Iterator[memoryview]:
    """The body of every record that is complete, while another process goes on writing the file.
    Reads only: a torn tail is left to the owner."""
    content = memoryview(path.read_bytes()) if path.is_file() else memoryview(b"")
    place = len(MAGIC)
    while place + RECORD.size <= len(content):
        end = place + RECORD.size + RECORD.unpack_from(content, place)[0]
        if end > len(content):
            return
        yield content[place + RECORD.size : end]
        place = end


def write_log(path: Path, bodies: Iterable[Sequence[Any]]) -> None:
    """Write a whole file beside `path`, sync it, and rename it into place."""
    temporary = path.with_name(f"{path.name}.new")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        _write_all(file, [MAGIC])
        for body in bodies:
            _write_all(file, _record(body))
        os.fsync(file)
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TableError(f"cannot write {path} ({error.strerror}); free some room") from error
    finally:
        os.close(file)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def _record(body: Sequence[Any]) -> list[Any]:
    length = sum(map(len, body))
    if length <= JOIN_BYTES_MAX:
        body = [b"".join(body)]
    assert length <= BODY_BYTES_MAX, f"one record of {length} bytes; put fewer rows at a time"
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    return [RECORD.pack(length, zlib.crc32(LENGTH.pack(length)), crc), *body]


def _write_all(file: int, parts: Sequence[Any]) -> int:
    total = sum(map(len, parts))
    if total <= JOIN_BYTES_MAX:
        parts = [b"".join(parts)]
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(file, rest) :]
    return total
