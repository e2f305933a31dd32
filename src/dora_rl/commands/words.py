"""What a long command says may get lost; what it does and its exit status may not.

Where its output goes to a disk that is full, printing raises, in the middle of a run or of its
clean end. Inside `may_be_lost` such words are dropped instead, those to come are tried again.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Words:
    """A text stream, as it was, whose writes never fail for want of room."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _dropped():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _dropped():
            self._stream.flush()


@contextmanager
def _dropped() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


@contextmanager
def may_be_lost() -> Iterator[None]:
    """Of this program's two outputs, while this lasts; also as a decorator."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Words(sys.stdout), _Words(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in before:
            try:
                stream.flush()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                # What is left would fail again at the interpreter's end, and change its status.
                with suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
