"""Tracebacks of the user's rewards, environments, agents and losses: from the workers to a file.

    worker --UserRaised--> controller --> RUN/user_errors.log

A worker sends a traceback once and then only its number. The file has each place once, with how
often it raised. Invariant: its size is bounded, however often and in how many places code raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dora_rl.user_code import Listener, one_line, origin_of, trace_of
from dora_rl.workers.messages import Send, UserRaised

FILE = "user_errors.log"
PLACES_MAX = 50  # further ones are counted
BEFORE_CHARS_MAX = 65_536  # kept of what stood in the file before a resume
RESUMED = "######## before the last resume\n"


def send_user_errors(send: Send) -> Listener:
    """A worker's listener."""
    sent: set[str] = set()

    def tell(what: str, error: BaseException) -> None:
        place, trace = origin_of(error), ""
        if place not in sent and len(sent) < PLACES_MAX:
            sent.add(place)
            trace = trace_of(error)
        send(UserRaised(what, place, one_line(error), trace))

    return tell


@dataclass(slots=True)
class Place:
    what: str
    worker: str
    trace: str
    first: str
    count: int = 0


class UserErrors:
    """The file of one run. `add` and `close` write it; `tell` is called once for every place."""

    def __init__(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        self.path = run_dir / FILE
        self.num = 0
        self._tell = tell
        self._places: dict[str, Place] = {}
        self._num_elsewhere = 0
        self._next_write = 1
        before = self.path.read_text(errors="replace") if self.path.is_file() else ""
        self._before = before[:BEFORE_CHARS_MAX]

    def add(self, worker: str, said: UserRaised) -> None:
        """A worker's message."""
        self.num += 1
        known = self._places.get(said.place)
        if known is None and said.trace and len(self._places) < PLACES_MAX:
            first = time.strftime("%Y-%m-%d %H:%M:%S")
            known = Place(said.what, worker, said.trace, first)
            self._places[said.place] = known
            self._next_write = self.num
            self._tell(f"{said.what} raised {said.line}; traceback in {self.path}")
        if known is None:
            self._num_elsewhere += 1
        else:
            known.count += 1
        if self.num >= self._next_write:
            self._write()
            self._next_write = 2 * self.num

    def _write(self) -> None:
        parts = [
            f"==== {p.count} times, {p.what} ({p.worker}), first at {p.first}\n{p.trace}\n\n"
            for p in self._places.values()
        ]
        if self._num_elsewhere:
            parts.append(f"==== {self._num_elsewhere} times elsewhere\n\n")
        before = RESUMED + self._before if self._before else ""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(parts) + before, errors="replace")
        temporary.replace(self.path)

    def close(self) -> None:
        if self.num:
            self._write()
