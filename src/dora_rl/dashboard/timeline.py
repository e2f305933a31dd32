"""The timeline as a document: one window of time, never more than a screen can show.

A wide window gets bins (how many requests of which version ran on each instance), a narrow one the
single stays. Versions are numbered modulo `COLOURS`, as the page colours them; neighbours differ.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.dashboard.documents import known
from dora_rl.observe.history import History
from dora_rl.observe.placements import coverage, lanes

COLOURS = 7
STAYS_MAX = 4_000  # drawn one by one up to here
MARKS_MAX = 1_500  # of a kind (loads, moves, waits) in one window
BYTES_MAX = 1_500_000  # of all bins


class Stays:
    """All stays of a history, sorted by their begin; made once per revision."""

    def __init__(self, history: History) -> None:
        found = history.placements.all_spans(history.now_s)
        order = np.argsort(found["begin"], kind="stable")
        self.columns: dict[str, NDArray[Any]] = {n: c[order] for n, c in found.items()}
        # The latest end so far: stays before the first place where it passes a time ended earlier.
        self.reached = np.maximum.accumulate(self.columns["end"])

    def within(self, begin: float, end: float) -> dict[str, NDArray[Any]]:
        first = int(np.searchsorted(self.reached, begin, "right"))
        last = int(np.searchsorted(self.columns["begin"], end, "left"))
        here = {name: column[first:last] for name, column in self.columns.items()}
        alive = here["end"] > begin
        return {name: column[alive] for name, column in here.items()}


def timeline(
    history: History, stays: Stays, begin: float, end: float, width: int
) -> dict[str, Any]:
    """What a timeline of `width` pixels shows from `begin` to `end`."""
    begin, end = max(0.0, begin), min(max(end, begin + 1e-3), max(history.now_s, 1e-3))
    names = sorted(history.names, key=_natural)
    row = np.argsort([history.names[name] for name in names]).astype(np.int64)
    here = stays.within(begin, end)
    here["instance"] = row[here["instance"]] if len(row) else here["instance"]
    document: dict[str, Any] = {
        "begin": begin,
        "end": end,
        "now": history.now_s,
        "instances": names,
        "slots": [history.slots_max.get(name, 0) for name in names],
        "num_stays": len(here["begin"]),
        "versions": np.unique(here["version"])[-200:].tolist(),
        "steps": _steps(history, begin, end, width),
        "loads": _loads(history, row, begin, end),
        "moves": _moves(history, row, begin, end),
        "waits": _waits(history, begin, end),
        "held": _held(history, begin, end),
        "asleep": [
            [int(row[int(which)]), since, until]
            for which, since, until in history.asleep
            if until > begin and since < end
        ],
        "incidents": [
            incident.as_json() for incident in history.incidents if begin <= incident.now_s <= end
        ][:MARKS_MAX],
    }
    if len(here["begin"]) <= STAYS_MAX:
        return document | {"stays": _single(history, here)}
    return document | {"bins": _bins(here, len(names), begin, end, width)}


def _single(history: History, here: dict[str, NDArray[Any]]) -> dict[str, Any]:
    size = history.params.group_size
    return {
        "begin": _rounded(here["begin"]),
        "end": _rounded(here["end"]),
        "instance": here["instance"].tolist(),
        "lane": lanes(here["begin"], here["end"], here["instance"]).tolist(),
        "version": here["version"].tolist(),
        "group": (here["slot"] // size).tolist(),
        "sample": (here["slot"] % size).tolist(),
        "began": here["began"].tolist(),
        "ended": here["ended"].tolist(),
    }


def _bins(
    here: dict[str, NDArray[Any]], num_rows: int, begin: float, end: float, width: int
) -> dict[str, Any]:
    """For each instance and colour a row of bytes: 255 is the fullest bin of the window."""
    num_bins = max(50, min(width // 2, BYTES_MAX // max(1, num_rows * COLOURS)))
    row = here["instance"].astype(np.int64) * COLOURS + here["version"] % COLOURS
    mean = coverage(here["begin"], here["end"], row, num_rows * COLOURS, (begin, end, num_bins))
    most = float(mean.reshape(num_rows, COLOURS, num_bins).sum(axis=1).max(initial=1e-9))
    level = np.where(mean > 0, np.maximum(1, np.rint(255 * mean / most)), 0).astype(np.uint8)
    return {"num": num_bins, "most": most, "data": base64.b64encode(level.tobytes()).decode()}


def _steps(history: History, begin: float, end: float, width: int) -> list[list[float | None]]:
    """[step, first group fed, batch closed, committed], at most one for every two pixels."""
    rows: list[list[float | None]] = []
    last = -np.inf
    for step, record in sorted(history.steps.items()):
        done = history.or_now(record.committed_s)
        fed = record.fed_s if record.fed_s == record.fed_s else record.closed_s
        if done >= begin and fed <= end and done - last > 2 * (end - begin) / max(1, width):
            rows.append([step, fed, known(record.closed_s), known(record.committed_s)])
            last = done
    return rows


def _loads(history: History, row: NDArray[Any], begin: float, end: float) -> list[list[Any]]:
    rows = [
        [
            int(row[load.instance]),
            load.version,
            load.begin_s,
            known(load.end_s),
            load.donor,
            load.failed,
        ]
        for load in history.loads
        if load.begin_s <= end and not load.end_s < begin
    ]
    return rows[:: len(rows) // MARKS_MAX + 1]


def _moves(history: History, row: NDArray[Any], begin: float, end: float) -> dict[str, Any]:
    moves = history.moves
    found = np.flatnonzero((moves["now"] >= begin) & (moves["now"] <= end))
    here = found[:: len(found) // MARKS_MAX + 1]
    group, sample = np.divmod(moves["slot"][here], history.params.group_size)
    src, dst = row[moves["src"][here]], row[moves["dst"][here]]
    columns = (src, dst, group, sample, history.groups["version"][group])
    rows = zip(_rounded(moves["now"][here]), *(c.tolist() for c in columns), strict=True)
    return {"num": len(found), "rows": [list(row) for row in rows]}


def _waits(history: History, begin: float, end: float) -> list[list[Any]]:
    """[step, begin, end, groups]."""
    rows = [
        [wait.step, wait.begin_s, until, list(wait.groups[:12])]
        for wait, until in history.ended_waits()
        if wait.begin_s <= end and until >= begin
    ]
    return rows[:: len(rows) // MARKS_MAX + 1]


def _held(history: History, begin: float, end: float) -> list[list[Any]]:
    """[step, begin, end, why]: admission was held back until the step's version was there."""
    rows = [
        [
            hold.step,
            begin_s,
            until_s,
            f"held back: {hold.ready} groups ready, {hold.running} running, {hold.ahead} of them "
            f"ahead of step {hold.step}; the learner needs the next batch in {hold.needed_s:.1f} s",
        ]
        for begin_s, hold in history.holds
        for until_s in [history.or_now(history.step(hold.step).committed_s)]
        if begin_s <= end and until_s >= begin
    ]
    return rows[:: len(rows) // MARKS_MAX + 1]


def _natural(name: str) -> tuple[str, int, str]:
    """instance2 comes before instance10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0), name


def _rounded(values: NDArray[Any]) -> list[float]:
    return np.round(values, 4).tolist()
