"""The watchdog: when nothing has progressed for a while, it says who waits for whom since when.

It only reads and tells; the waits themselves are broken by their own deadlines. Progress is
anything that brings the run forward: a token, a sample, a reward, a step, a loaded version.
"""

from __future__ import annotations

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
    return (state.committed, state.trainer.progress, scored, decoded, held, ended, extra)
