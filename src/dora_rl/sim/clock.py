"""Virtual time: a heap of moments and what happens then. Same seed, same order, always."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """Discrete events. Ties are broken by the order in which they were scheduled."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def now(self) -> float:
        return self._now

    def at(self, moment: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(moment, self._now), next(self._numbers), what))

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self.at(self._now + delay_s, what)

    def run(self, done: Callable[[], bool], until_s: float = float("inf")) -> bool:
        """Let time pass until `done` (True), or until nothing happens or time is up (False)."""
        while not done():
            if not self._heap or self._heap[0][0] > until_s:
                return False
            self._now, _, what = heapq.heappop(self._heap)
            what()
        return True
