"""Which instance decoded which request when, as spans: paired up from what the log tells.

A placement row either begins a stay on an instance (dispatched, moved there, unparked, given new
weights) or ends one (finished, failed, parked, aborted). A new stay ends the one before it. Rows
come in chunks, in the order of the log; what is still open at the end of a chunk is carried on.
Invariant: the stays of one request do not overlap.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.observe.columns import Growing, Table, rows_of


class Why(IntEnum):
    """What began a stay, or ended it."""

    DISPATCHED = 0
    MOVED = 1
    UNPARKED = 2
    REVERSED = 3  # partial: the same request under new weights
    FINISHED = 4
    FAILED = 5
    PARKED = 6
    ABORTED = 7
    LOST = 8  # the instance died, or the whole run


ENDS = Why.FINISHED  # from here on a row ends a stay
KEEP = -1  # version of a row that does not change it


# The columns of placement rows: `slot` names the request, `at` orders rows.
ROW = [
    ("at", "i8"),
    ("now", "f8"),
    ("slot", "i8"),
    ("instance", "i8"),
    ("version", "i8"),
    ("why", "i8"),
]


class Placements:
    """`spans`: closed stays, in no order. `open`: the current stay by slot, instance -1 if none."""

    def __init__(self) -> None:
        self.spans = Growing(
            begin=("f8", 0), end=("f8", 0), slot=("i4", 0), instance=("i4", 0), version=("i4", 0),
            began=("i1", 0), ended=("i1", 0),
        )  # fmt: skip
        self.open = Growing(
            begin=("f8", 0), instance=("i4", -1), version=("i4", KEEP), began=("i1", 0)
        )

    def add(self, rows: Table) -> None:
        """Rows of one stretch of the log in which no instance was lost."""
        self.open.reach(int(rows["slot"].max(initial=-1)) + 1)
        by_request = rows["slot"] * (int(rows["at"].max(initial=0)) + 1) + rows["at"]
        rows = self._without_strays(rows_of(rows, np.argsort(by_request)))
        slot, now, why = rows["slot"], rows["now"], rows["why"]
        if not len(slot):
            return
        first = _first_of_each(slot)
        last = np.append(first[1:], True)
        version = self._versions(rows, first)
        begins = why < ENDS
        there = first & (self.open["instance"][slot] >= 0)
        self._close(slot[there], now[there], why[there])
        stays = {"begin": now, "slot": slot, "instance": rows["instance"], "version": version,
                 "began": why}  # fmt: skip
        here = np.flatnonzero(begins & ~last)
        self.spans.extend(rows_of(stays, here) | {"end": now[here + 1], "ended": why[here + 1]})
        self.open["version"][slot[last]] = version[last]
        here = last & begins  # what is still open
        for name in ("begin", "instance", "began"):
            self.open[name][slot[here]] = stays[name][here]

    def _without_strays(self, rows: Table) -> Table:
        """Drop ends that come from an instance where the request no longer is (late messages)."""
        while True:
            slot, instance, ends = rows["slot"], rows["instance"], rows["why"] >= ENDS
            before = np.append(-1, np.where(ends, -1, instance))[:-1]
            before = np.where(_first_of_each(slot), self.open["instance"][slot], before)
            stray = ends & (before != instance)
            if not stray.any():
                return rows
            rows = rows_of(rows, ~stray)

    def _versions(self, rows: Table, first: NDArray[Any]) -> NDArray[Any]:
        """The version of each row; one that keeps it takes the last one given."""
        slot, version = rows["slot"], rows["version"]
        given = np.where(first & (version == KEEP), self.open["version"][slot], version)
        known = np.where((given != KEEP) | first, np.arange(len(given)), 0)
        return given[np.maximum.accumulate(known)]

    def _close(self, slots: NDArray[Any], now: Any, why: Any) -> None:
        self.spans.extend(self._opened(slots, now, why))
        self.open["instance"][slots] = -1

    def _opened(self, slots: NDArray[Any], now: Any, why: Any) -> Table:
        """Open stays, as spans that end now."""
        spans = {name: self.open[name][slots] for name in ("begin", "instance", "version", "began")}
        ends = {
            "end": np.broadcast_to(now, slots.shape),
            "ended": np.broadcast_to(why, slots.shape),
        }
        return spans | {"slot": slots} | ends

    def lose(self, instance: int | None, now: float) -> None:
        """An instance is gone (None: all of them), and with it every stay on it."""
        places = self.open["instance"]
        self._close(
            np.flatnonzero(places >= 0 if instance is None else places == instance),
            now,
            int(Why.LOST),
        )

    def all_spans(self, now: float) -> Table:
        """Closed stays and, up to `now`, the open ones."""
        opened = self._opened(np.flatnonzero(self.open["instance"] >= 0), now, -1)
        return {name: np.append(self.spans[name], column) for name, column in opened.items()}


def _first_of_each(slot: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows are the first of their request."""
    return np.append(True, slot[1:] != slot[:-1])[: len(slot)]


# -- how much ran where ----------------------------------------------------------------------------


Floats = NDArray[np.float64]


def coverage(
    begin: Floats, end: Floats, row: NDArray[Any], num_rows: int, edges: tuple[float, float, int]
) -> Floats:
    """Mean number of stays in each bin of each row: (num_rows, num_bins).

    `edges` are the first bin's begin, the last one's end and the number of bins. A stay that
    begins in the middle of a bin counts half there and whole from the next bin on, until its end
    is taken off in the same way.
    """
    low, high, num_bins = edges
    scale = num_bins / max(high - low, 1e-12)
    total = np.zeros((num_rows, num_bins + 1))
    for points, sign in ((begin, 1.0), (end, -1.0)):
        place = np.clip((points - low) * scale, 0.0, num_bins)
        whole = np.minimum(place.astype(np.int64), num_bins)
        key = row * (num_bins + 1) + whole
        shape = (num_rows, num_bins + 1)
        ones = np.bincount(key, minlength=total.size).reshape(shape).astype(np.float64)
        part = np.bincount(key, 1.0 - (place - whole), total.size).reshape(shape)
        later = np.cumsum(ones, axis=1)
        total += sign * part
        total[:, 1:] += sign * later[:, :-1]
    return np.maximum(total[:, :num_bins], 0.0)


def lanes(begin: Floats, end: Floats, row: NDArray[Any]) -> NDArray[np.int64]:
    """A lane for each stay, so that stays of one lane of one row do not overlap; lowest first."""
    lane = np.zeros(len(begin), np.int64)
    free: defaultdict[int, list[int]] = defaultdict(list)
    used: Counter[int] = Counter()
    busy: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for place in np.lexsort((end, begin, row)).tolist():
        key, start = int(row[place]), float(begin[place])
        running, idle = busy[key], free[key]
        while running and running[0][0] <= start:
            heapq.heappush(idle, heapq.heappop(running)[1])
        if not idle:
            idle.append(used[key])
            used[key] += 1
        lane[place] = chosen = heapq.heappop(idle)
        heapq.heappush(running, (float(end[place]), chosen))
    return lane


def busy_s(begin: Floats, end: Floats, row: NDArray[Any], num_rows: int) -> Floats:
    """Seconds with at least one stay, for each row."""
    order = np.lexsort((begin, row))
    begin, end, row = begin[order], end[order], row[order]
    total = np.zeros(num_rows)
    for key in range(num_rows):
        here = slice(*np.searchsorted(row, [key, key + 1]))
        starts, ends = begin[here], end[here]
        if len(starts):
            reached = np.maximum.accumulate(ends)
            gaps = np.maximum(starts[1:] - reached[:-1], 0.0)
            total[key] = reached[-1] - starts[0] - gaps.sum()
    return total
