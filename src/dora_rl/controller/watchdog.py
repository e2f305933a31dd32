"""What a controller looks at with every tick: its watchdog, and its garbage.

The watchdog: when nothing has progressed for a while, it says who waits for whom since when.

It only reads and tells; the waits themselves are broken by their own deadlines. Progress is
anything that brings the run forward: a token, a sample, a reward, a step, a loaded version.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

from dora_rl.core.state import State
from dora_rl.core.waits import waits


class Watchdog:
    """Looked at with every tick; tells once per `limit_s` without progress."""

    def __init__(
        self, path: Path, limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._limit_s, self._clock = path, limit_s, clock
        self._mark: tuple[int, ...] = ()
        self._moved_s = self._told_s = clock()
        self._since: dict[tuple[str, str], float] = {}

    def look(self, state: State, extra: int = 0) -> list[str]:
        """One line per wait if it is time to tell, else nothing. `extra` counts other progress."""
        now, mark = self._clock(), progress_mark(state, extra)
        found = {(wait.who, wait.what) for wait in waits(state)}
        self._since = {wait: self._since.get(wait, now) for wait in sorted(found)}
        if mark != self._mark:
            self._mark, self._moved_s, self._told_s = mark, now, now
        if now - self._told_s < self._limit_s:
            return []
        self._told_s = now
        return self._tell(now)

    def _tell(self, now: float) -> list[str]:
        still_s = now - self._moved_s
        rows = [
            {"who": who, "for": what, "since_s": round(now - since, 1)}
            for (who, what), since in self._since.items()
        ]
        record = {"time": time.time(), "no_progress_s": round(still_s, 1), "waits": rows}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        head = f"no progress for {still_s:.0f} s"
        return [
            head,
            *(f"{r['who']} waits for {r['for']} since {r['since_s']:.0f} s" for r in rows),
        ]


def progress_mark(state: State, extra: int = 0) -> tuple[int, ...]:
    """Changes when the run has come forward."""
    scored = sum(group.num_scored + group.num_failed for group in state.groups.values())
    decoded = sum(instance.decode_steps for instance in state.instances.values())
    held = sum(len(instance.held) for instance in state.instances.values())
    ended = sum(state.num_ended.values())
    return (state.committed, state.learner.progress, scored, decoded, held, ended, extra)


FULL_EVERY_S = 600.0
NEVER = 1 << 30


def collect_no_more_in_full() -> None:
    """From now on only `Garbage` (or nobody) starts a full collection."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


class Garbage:
    """The controller's garbage: freed as it falls, collected in full only between two events.

    What the core and the ports keep has no reference cycles, so counting references frees it. A
    full collection looks at everything that is alive: with thousands of instances it takes longer
    than any decision, and Python would begin it in the middle of one. Young generations are left
    as they are. Looked at with every tick.
    """

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
