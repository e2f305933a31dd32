"""Whose request is next: one of each client in turn, and those of a client in its own order.

    client a   1 2 3 4 5 6 7 8        taken: a1 b1 a2 b2 a3 a4 …
    client b   1 2

Requests of a client have numbers and may come in any order: number n waits until n - 1 was taken.
Pure: no clock, no I/O. Invariants: a request is taken at most once; between two requests of a
client every other client that has one that may run gets one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Missing(NamedTuple):
    """Requests that waited too long for one before them."""

    client: str
    seq: int  # the one that never came
    items: list[object]


@dataclass(slots=True)
class Line(Generic[T]):
    """What one client has waiting, by number, and since when."""

    next_seq: int
    waiting: dict[int, tuple[T, float]] = field(default_factory=dict)


class Turns(Generic[T]):
    """Clients in the order in which they had their last turn, longest ago first."""

    def __init__(self) -> None:
        self._lines: dict[str, Line[T]] = {}
        self.num_waiting = 0

    def open(self, client: str, first_seq: int = 1) -> None:
        self._lines.setdefault(client, Line(first_seq))

    def close(self, client: str) -> list[T]:
        """The client is gone; returns what it had waiting, in order."""
        line = self._lines.pop(client, None)
        items = [] if line is None else [line.waiting[seq][0] for seq in sorted(line.waiting)]
        self.num_waiting -= len(items)
        return items

    def add(self, client: str, seq: int, item: T, now: float) -> None:
        line = self._lines[client]
        assert seq >= line.next_seq and seq not in line.waiting, "each number is taken once"
        line.waiting[seq] = (item, now)
        self.num_waiting += 1

    def is_past(self, client: str, seq: int) -> bool:
        """Whether that number was taken, or given up, before."""
        return seq < self._lines[client].next_seq

    def is_awaited(self, client: str, seq: int) -> bool:
        """Whether others of the client wait, and wait for that number."""
        return bool(self._lines[client].waiting) and self.is_next(client, seq)

    def is_next(self, client: str, seq: int) -> bool:
        """Whether that number would be the client's first."""
        line = self._lines[client]
        return seq == line.next_seq and seq not in line.waiting

    def num_of(self, client: str) -> int:
        return len(self._lines[client].waiting)

    def take(self, may_run: Callable[[str, T], bool] = lambda client, item: True) -> T | None:
        """The next request of the first client that has one which may run now."""
        for client, line in self._lines.items():
            if line.next_seq in line.waiting and may_run(client, line.waiting[line.next_seq][0]):
                item, _ = line.waiting.pop(line.next_seq)
                line.next_seq += 1
                self._lines[client] = self._lines.pop(client)  # behind all others
                self.num_waiting -= 1
                return item
        return None

    def remove(self, client: str, seq: int) -> T | None:
        """Take a request out unseen; those behind it go on. None: it is not waiting."""
        line = self._lines.get(client)
        if line is None or seq not in line.waiting or seq != line.next_seq:
            return None
        item, _ = line.waiting.pop(seq)
        line.next_seq += 1
        self.num_waiting -= 1
        return item

    def overdue(self, now: float, most_s: float) -> list[Missing]:
        """Give up what has waited longer for a number that did not come: an update must not go on
        without a part of its batch. The client's next requests count from there."""
        found: list[Missing] = []
        for client, line in self._lines.items():
            if not line.waiting or line.next_seq in line.waiting:
                continue
            if now - min(since for _, since in line.waiting.values()) > most_s:
                items: list[object] = [line.waiting[seq][0] for seq in sorted(line.waiting)]
                found.append(Missing(client, line.next_seq, items))
                line.next_seq = max(line.waiting) + 1
                self.num_waiting -= len(items)
                line.waiting.clear()
        return found
