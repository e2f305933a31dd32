"""Follow an event log as it grows: every byte is read once.

Reads whole lines only; what a writer has not finished waits for the next look. A resumed run may
cut a torn last line off, which was never read. Never writes, never blocks the run it watches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dora_rl.observe.columns import Columns, columns, read_segments
from dora_rl.observe.history import History
from dora_rl.observe.segments import SegmentReaders, segments, start_readers
from dora_rl.types import UserError

CHUNK_BYTES = 8 << 20


class LogTail:
    """Where we are in a folder of segments. `readers` may have been started before."""

    def __init__(self, folder: Path, readers: SegmentReaders | None = None) -> None:
        self._folder = folder
        self._readers = readers
        self._path: Path | None = None
        self._offset = 0
        self.num_bytes = 0  # read so far

    def chunks(self) -> Iterator[bytes]:
        """Whole lines that were not read before, in the order of the log."""
        paths = segments(self._folder)
        if not paths:
            raise UserError(f"{self._folder} holds no event log")
        for path in paths:
            if self._path is not None and path < self._path:
                continue
            if path != self._path:
                self._path, self._offset = path, 0
            yield from self._rest(path)

    def readers(self) -> SegmentReaders | None:
        """Processes that read the beginning of a long log, as long as nothing was read of it."""
        if self._path is not None:
            return None
        started, self._readers = self._readers, None
        return started or start_readers(self._folder)

    def passed(self, path: Path) -> None:
        """A segment was read elsewhere, all of it."""
        self._path, self._offset = path, path.stat().st_size
        self.num_bytes += self._offset

    def _rest(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            while True:
                file.seek(self._offset)
                data = file.read(CHUNK_BYTES)
                end = data.rfind(b"\n") + 1
                if not end and len(data) == CHUNK_BYTES:  # a snapshot can be longer than a chunk
                    data += file.readline()
                    end = len(data) if data.endswith(b"\n") else 0
                if not end:
                    return
                self._offset += end
                self.num_bytes += end
                yield data[:end]


def read_columns(tail: LogTail) -> Iterator[Columns]:
    """New lines as columns, in order; the closed segments of a long log on several cores."""
    readers = tail.readers()
    if readers is not None:
        for path, found in zip(readers.paths, read_segments(readers), strict=True):
            tail.passed(path)
            yield found
    for chunk in tail.chunks():
        yield columns(chunk)


def follow(history: History, tail: LogTail) -> bool:
    """Bring a history up to date; true if there was anything new."""
    before = history.num_entries
    for read in read_columns(tail):
        history.add(read)
    return history.num_entries > before


def read_history(folder: Path) -> History:
    """The history of a whole log."""
    history = History()
    follow(history, LogTail(folder))
    return history
