"""How much ran where: stays added up into bins, put into lanes, and the gaps between them.

Pure arithmetic on arrays of begins and ends; knows nothing of logs or runs.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    free: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    busy: dict[int, list[tuple[float, int]]] = {}
    for place in np.lexsort((end, begin, row)).tolist():
        key, start = int(row[place]), float(begin[place])
        running, idle = busy.setdefault(key, []), free.setdefault(key, [])
        while running and running[0][0] <= start:
            heapq.heappush(idle, heapq.heappop(running)[1])
        if idle:
            chosen = heapq.heappop(idle)
        else:
            chosen = used.get(key, 0)
            used[key] = chosen + 1
        lane[place] = chosen
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
