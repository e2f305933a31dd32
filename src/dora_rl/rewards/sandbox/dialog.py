"""Our side of the two pipes of a run: asks go in once the program is ready, answers come out.

Never waits: `step` does what can be done at once. What comes out is the program's word; reading it
is strict, and nothing in it is executed. Invariant: nothing is asked before the program's own code
has run through, and answers beyond the limit are not kept.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from dora_rl.rewards.sandbox import values
from dora_rl.rewards.sandbox.limits import Answer, Ask
from dora_rl.rewards.sandbox.program import READY, THE_END

PIPE_BYTES = 1 << 16
PIPE_BYTES_MAX = 1 << 20  # what an ordinary user may ask for


class Dialog:
    """Owns its two ends; the program's ends, `theirs`, are to be closed when they are handed on."""

    def __init__(self, asks: Sequence[Ask], bytes_max: int) -> None:
        read, self._asks_fd = os.pipe()
        self.answers_fd, write = os.pipe()
        self.theirs = (read, write)
        for fd in (self._asks_fd, self.answers_fd):
            os.set_blocking(fd, False)
        text = json.dumps([[ask.code, ask.value] for ask in asks]).encode()
        if len(text) > PIPE_BYTES:
            with suppress(OSError):
                fcntl.fcntl(self._asks_fd, fcntl.F_SETPIPE_SZ, min(len(text), PIPE_BYTES_MAX))
        self._rest = memoryview(text)
        self._asks, self._bytes_max = asks, bytes_max
        self._text = bytearray()

    @property
    def waiting(self) -> bool:
        """The program may still become ready, and then wants to be told at once."""
        return bool(self._asks) and READY.startswith(self._text) and self._text != READY

    def step(self) -> bool:
        """Take what is there, send what is due. False if the program answers too much."""
        with suppress(BlockingIOError):
            while len(self._text) <= self._bytes_max and (
                more := os.read(self.answers_fd, PIPE_BYTES)
            ):
                self._text += more
        if self._text.startswith(READY):
            self._send()
        elif not READY.startswith(self._text):
            # It spoke out of turn: nothing will be asked, and it need not wait for it.
            self._hang_up()
        return len(self._text) <= self._bytes_max

    def _send(self) -> None:
        try:
            with suppress(BlockingIOError):
                while self._rest and self._asks_fd >= 0:
                    self._rest = self._rest[os.write(self._asks_fd, self._rest) :]
        except BrokenPipeError:
            self._rest = self._rest[:0]
        if not self._rest:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._asks_fd >= 0:
            os.close(self._asks_fd)
        self._asks_fd = -1

    def close(self) -> None:
        self._hang_up()
        os.close(self.answers_fd)

    def came_to_end(self) -> bool:
        return self._text == THE_END or self._text.endswith(b"\n" + THE_END)

    def answers(self) -> tuple[Answer | None, ...]:
        """In the order of the asks. Lines too many or out of place: no answer counts."""
        none = (None,) * len(self._asks)
        head, *lines = bytes(self._text).split(b"\n")
        if not self._asks or head + b"\n" != READY:
            return none
        # What follows the last line break is empty, or a line that was cut off.
        lines = lines[:-1]
        if lines and lines[-1] + b"\n" == THE_END:
            lines.pop()
        if len(lines) > len(self._asks):
            return none
        read = [_read(line, ask) for line, ask in zip(lines, self._asks, strict=False)]
        return (*read, *none[len(read) :])


def _read(line: bytes, ask: Ask) -> Answer | None:
    """None for anything that `program` would not have written."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list):
        return None
    match cast(list[Any], found):
        case ["raised", str()]:
            return Answer(False)
        case ["done"] if not ask.value:
            return Answer(True)
        case ["object", str(kind), bool(truth)] if ask.value:
            return Answer(True, values.Opaque(kind, truth))
        case ["value", value] if ask.value:
            return _plain(value)
        case _:
            return None


def _plain(value: Any) -> Answer | None:
    try:
        return Answer(True, values.decode(value))
    except values.BadValue:
        return None
