"""Files that are only ever appended to: one way to write them, one rule for their ends.

A file is a row of records: lines, or frames that say how long they are. A writer that dies leaves
at most one record that is not complete, the last: it is *torn*. A file that is opened for writing
is cut there, a reader ends there. A tail of zeros is torn too: a power cut leaves it where a file
had grown already. A complete record whose checksum does not fit is *damaged*. Nobody knows what it
said, so it is never cut and never passed over: whoever meets it names the file and the place.

    line     text, newline                                   complete with its newline
    checked  CRC of the text in hex, blank, text, newline
    JSON     a line without a checksum: one that cannot be read is damaged
    frame    length | CRC of the length | CRC of the body | body

Never knows what a record means. Invariant: what is read is an exact prefix of what was appended,
and holds every record whose `append` returned.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from dora_rl.types import UserError

FRAME = struct.Struct("<III")
FRAME_BYTES_MAX = (1 << 32) - 1
_LENGTH = struct.Struct("<I")
_JOIN_BYTES_MAX = 1 << 20  # smaller parts are joined and written by one call
_ZEROS = 512  # so many at the end were never written


class Damaged(UserError):
    """A complete record that is not what was appended."""


class AppendLog:
    """One file, open for appending; it may not exist. What lies behind `size` is cut off.

    What was appended survives the death of processes. A power cut it survives from the next `sync`
    on, or at once if `synced`.
    """

    def __init__(
        self, path: Path, *, size: int | None = None, synced: bool = False, new: bool = False
    ) -> None:
        self.path, self._synced = path, synced
        self._changed = True  # whoever wrote it before may not have brought it to the disk
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if new else 0)
        self._file = os.open(path, flags, 0o644)
        self.num_bytes = os.lseek(self._file, 0, os.SEEK_END)
        if size is not None:
            self.cut(size)
        self._synced_at = time.monotonic()

    @classmethod
    def of_lines(cls, path: Path, *, synced: bool = False) -> AppendLog:
        """With a torn last line cut off."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls(path, size=lines_end(path), synced=synced)

    def append(self, *parts: Any) -> None:
        """All or nothing: after a failed write the file is as it was."""
        try:
            self._changed = True
            written = _write(self._file, parts)
            if self._synced:
                self.sync()
        except OSError:
            self.cut(self.num_bytes)
            raise
        self.num_bytes += written

    def unsynced_s(self) -> float:
        """Since it was last brought to the disk."""
        return time.monotonic() - self._synced_at

    def sync(self) -> None:
        """To the disk, if anything has changed since the last time."""
        if self._changed:
            os.fdatasync(self._file)
        self._changed, self._synced_at = False, time.monotonic()

    def cut(self, size: int) -> None:
        os.ftruncate(self._file, size)
        os.lseek(self._file, size, os.SEEK_SET)
        self.num_bytes, self._changed = size, True

    def replace(self, data: bytes) -> None:
        self.rewrite([data])

    def rewrite(self, parts: Iterable[Any]) -> None:
        """All that is there gives way to this, at once and on the disk."""
        write_whole(self.path, parts)
        os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self.num_bytes, self._changed = os.lseek(self._file, 0, os.SEEK_END), False

    def close(self) -> None:
        os.close(self._file)


def write_whole(path: Path, parts: Iterable[Any]) -> None:
    """A file beside `path`, on the disk, then renamed into its place."""
    fresh = path.with_name(f".{path.name}.new")  # hidden, should it be left behind
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        for part in parts:
            _write(file, [part])
        os.fsync(file)
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    flush(path.parent)


def flush(path: Path) -> None:
    """A file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """A reader sees the text that was there or this one, never a part. Not brought to the disk."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, errors=errors)
    temporary.replace(path)


def _write(file: int, parts: Sequence[Any]) -> int:
    total = sum(map(len, parts))
    if total <= _JOIN_BYTES_MAX:
        parts = [b"".join(parts)]
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(file, rest) :]
    return total


# -- lines ----------------------------------------------------------------------------------------


def whole_lines(data: bytes) -> list[bytes]:
    """The complete lines, each with its newline."""
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]]


def lines_end(path: Path) -> int:
    """Where the last complete line ends. Costs what is torn, not what is there."""
    if not path.is_file() or not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.rfind(b"\n") + 1


def checked(text: bytes) -> bytes:
    """A line with its checksum."""
    return b"%08x %s\n" % (zlib.crc32(text), text)


def text_of(line: bytes) -> bytes | None:
    """What was written by `checked`; None if it is torn or damaged."""
    text = line[9:-1]
    return text if line == checked(text) else None


# -- frames ---------------------------------------------------------------------------------------


def frame(body: Sequence[Any]) -> list[Any]:
    """The parts of a frame, for `append`."""
    length = sum(map(len, body))
    assert length <= FRAME_BYTES_MAX, f"one record of {length} bytes; put fewer rows at a time"
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    return [FRAME.pack(length, zlib.crc32(_LENGTH.pack(length)), crc), *body]


def frames(content: memoryview, place: int, name: str) -> Iterator[tuple[int, memoryview]]:
    """Each complete frame from `place` on: where it ends, and its body. Raises `Damaged`."""
    while place + FRAME.size <= len(content):
        length, length_crc, body_crc = FRAME.unpack_from(content, place)
        end = place + FRAME.size + length
        body = content[place + FRAME.size : end]
        known = zlib.crc32(_LENGTH.pack(length)) == length_crc
        if known and end > len(content):
            return
        if not known or zlib.crc32(body) != body_crc:
            last = not known or end == len(content)
            if last and not any(content[max(place, len(content) - _ZEROS) :]):
                return
            raise Damaged(f"{name} is damaged at byte {place}; restore it from a copy")
        yield end, body
        place = end


# -- lines of JSON without checksums ---------------------------------------------------------------


Pass: TypeAlias = Callable[[Damaged], None]
"""What is done with a line that cannot be read, which is then passed over."""


def refuse(error: Damaged) -> None:
    raise error


def read_lines(path: Path, damaged: Pass = refuse) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                whole = line.endswith(b"\n")
                found = _parsed(line, f"{path} line {number}", damaged) if whole else None
                if found is not None:
                    yield found


def _parsed(line: bytes, name: str, damaged: Pass) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
        if isinstance(found, dict):
            return found
        damaged(Damaged(f"{name} is damaged (it is no record)"))
    except ValueError as error:
        damaged(Damaged(f"{name} {shape_problem(error)}"))
    return None


def shape_problem(error: Exception) -> str:
    """What is wrong with JSON that cannot be read, or is not of the shape that was written."""
    what = f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)
    return f"is damaged ({what})"


def cut_lines(path: Path, keep: Callable[[dict[str, Any]], bool], damaged: Pass = refuse) -> None:
    """Remove a torn last line, and whole lines from the end on until one is to be kept.

    Costs what is removed, not what is there.
    """
    end = lines_end(path)
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            found = _parsed(data[start:end], f"{path} at byte {start}", damaged)
            if found is not None and keep(found):
                break
            end = start
    AppendLog(path, size=end).close()


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool], damaged: Pass = refuse) -> None:
    """Remove a torn last line, and every line that is not to be kept. Reads the whole file."""
    seen: list[Damaged] = []

    def passed(error: Damaged) -> None:
        damaged(error)
        seen.append(error)

    cut_lines(path, lambda line: True, passed)
    lines = list(read_lines(path, passed))
    if not seen and all(map(keep, lines)):
        return
    write_whole(path, ((json.dumps(line) + "\n").encode() for line in lines if keep(line)))
