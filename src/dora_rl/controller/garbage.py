"""The controller's garbage: freed as it falls, collected in full only between two events.

What the core and the ports keep has no reference cycles, so counting references frees it. A full
collection looks at everything that is alive: with thousands of instances it takes longer than any
decision, and Python would begin it in the middle of one. Young generations are left as they are.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

FULL_EVERY_S = 600.0
NEVER = 1 << 30


def collect_no_more_in_full() -> None:
    """From now on only `Garbage` (or nobody) starts a full collection."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


class Garbage:
    """Looked at with every tick of a controller."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._collected_s = clock()
        self._before = gc.get_threshold()
        collect_no_more_in_full()

    def tick(self) -> None:
        now = self._clock()
        if now - self._collected_s >= FULL_EVERY_S:
            self._collected_s = now
            gc.collect()

    def end(self) -> None:
        """As it was before, for whoever uses this process next."""
        gc.set_threshold(*self._before)
