"""The files of an event log, and processes on other cores that read many of them.

Threads would only wait for each other at the interpreter's lock. This module itself is light: the
readers (`columns`) are under way before the process that asked for them has loaded numpy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

READERS = 2
MANY_BYTES = 64 << 20  # from here on processes are worth their start
PIPE_BYTES = 1 << 20  # room for an answer, so that its reader can go on with the next segment
_READER = "from dora_rl.observe.columns import main; main()"
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # nothing to multiply
    # Arrays of megabytes come and go with each segment. By default glibc hands such memory back
    # at once, and fetching it again, page by page, costs as much as the reading itself.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(16 << 20),
}


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


class SegmentReaders:
    """Readers under way. Answers for `paths[i]` come, in order, on `streams[i % len(streams)]`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", _READER, *map(str, self.paths[n::READERS])],
                stdout=subprocess.PIPE,
                env=os.environ | _ENVIRONMENT,
                start_new_session=True,  # Ctrl-C is for whoever started them
            )
            for n in range(min(READERS, len(self.paths)))
        ]
        self.streams = [p.stdout for p in self._processes if p.stdout is not None]
        for stream in self.streams:
            with contextlib.suppress(AttributeError, OSError):  # not here, or not allowed
                fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def close(self) -> None:
        for process, stream in zip(self._processes, self.streams, strict=True):
            process.kill()
            process.wait()
            stream.close()


def start_readers(folder: Path) -> SegmentReaders | None:
    """Begin to read what is closed of a log; None if it is too short to be worth it."""
    closed = segments(folder)[:-1]
    many = sum(path.stat().st_size for path in closed) >= MANY_BYTES
    return SegmentReaders(closed) if many else None
