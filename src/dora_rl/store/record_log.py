"""The file of a table: an append-only file of frames behind a mark (see `io.append_log`).

Never knows what a record means. A torn tail (the writer died) is cut off; damage is an error that
names the place, since dropping what follows would lose rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dora_rl.io.append_log import AppendLog, Damaged, frame, frames

MAGIC = b"dora-table-1\n"
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
        self._file = AppendLog(path)
        if self._file.num_bytes < len(MAGIC):
            self._file.cut(0)
            self._file.append(MAGIC)
        self._rewritten_bytes = 0

    def read(self) -> Iterator[memoryview]:
        """The body of every record; a torn tail is cut off the file."""
        content = memoryview(self.path.read_bytes())
        if bytes(content[: len(MAGIC)]) != MAGIC:
            raise TableCorrupt(f"{self.path} is not a table of this program")
        good = len(MAGIC)
        try:
            for end, body in frames(content, good, str(self.path)):
                yield body
                good = end
        except Damaged as error:
            raise TableCorrupt(str(error)) from error
        self._file.cut(good)

    def append(self, body: Sequence[Any]) -> None:
        """All or nothing: after a failed write the file is cut back to where it was."""
        try:
            self._file.append(*frame(body))
        except OSError as error:
            raise _no_room(self.path, error) from error

    def sync(self) -> None:
        self._file.sync()

    def rewrite(self, bodies: Iterable[Sequence[Any]]) -> None:
        """Replace everything by these records, atomically, and go on appending after them."""
        try:
            self._file.rewrite(_parts(bodies))
        except OSError as error:
            raise _no_room(self.path, error) from error
        self._rewritten_bytes = self._file.num_bytes

    def mostly_old(self, live_bytes: int) -> bool:
        """Time to rewrite, so that reading the file does not take longer the longer a run is."""
        live_bytes = max(live_bytes, self._rewritten_bytes)
        return self._file.num_bytes > REWRITE_BYTES_MIN + REWRITE_RATIO * live_bytes

    def close(self) -> None:
        self._file.close()


def whole_records(path: Path) -> Iterator[memoryview]:
    """The body of every record that is complete, while another process goes on writing the file.
    Reads only: a torn tail is left to the owner."""
    content = memoryview(path.read_bytes()) if path.is_file() else memoryview(b"")
    for _, body in frames(content, len(MAGIC), str(path)):
        yield body


def _parts(bodies: Iterable[Sequence[Any]]) -> Iterator[Any]:
    yield MAGIC
    for body in bodies:
        yield from frame(body)


def _no_room(path: Path, error: OSError) -> TableError:
    return TableError(f"cannot write {path} ({error.strerror}); free some room")
