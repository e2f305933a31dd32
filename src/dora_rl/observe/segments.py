"""The files of an event log, and processes on other cores that read many of them.

Threads would only wait for each other at the interpreter's lock. One process is started; it loads
what it needs (`columns`) and forks, so that loading happens once. This module itself is
light: the readers are under way before the process that asked for them has loaded numpy.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

READERS = 2
MANY_BYTES = 64 << 20  # from here on processes are worth their start
PIPE_BYTES = 1 << 20  # room for an answer, so that its reader can go on with the next segment
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # nothing to multiply; and a fork wants no threads
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
        pipes = [os.pipe() for _ in range(min(READERS, len(self.paths)))]
        self.streams = [os.fdopen(get, "rb") for get, _ in pipes]
        ends = [put for _, put in pipes]
        for put in ends:
            with contextlib.suppress(AttributeError, OSError):  # not here, or not allowed
                fcntl.fcntl(put, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dora_rl.observe.columns", *map(str, ends)],
            stdin=subprocess.PIPE,
            pass_fds=ends,
            env=os.environ | _ENVIRONMENT,
            start_new_session=True,
        )
        for put in ends:
            os.close(put)
        assert self._process.stdin is not None
        with self._process.stdin as told, contextlib.suppress(BrokenPipeError):
            told.write(json.dumps([str(path) for path in self.paths]).encode())

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_readers(folder: Path) -> SegmentReaders | None:
    """Begin to read what is closed of a log; None if it is too short to be worth it."""
    closed = segments(folder)[:-1]
    if sum(path.stat().st_size for path in closed) < MANY_BYTES:
        return None
    return SegmentReaders(closed)
