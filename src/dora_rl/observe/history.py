"""The history of a run for people to look at: groups, samples, stays, steps, loads, incidents.

Built from the event log chunk by chunk, as it grows; the dashboard, `trace` and `plot` read it.
It only collects: whether promises were kept is `audit`'s part. Times are seconds of running: the
run begins at 0, and a pause between a stop and its resume counts as nothing. Memory is a few dozen
bytes per sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.observe.columns import Columns, Growing, LogTail, Rare, Table, read_columns
from dora_rl.observe.placements import KEEP, Placements, Rows, Why
from dora_rl.types import Finish, StepIndex


@dataclass(slots=True)
class StepRecord:
    """When a step got its first group, had all, and was committed; nan: not yet."""

    fed_s: float = np.nan
    closed_s: float = np.nan
    committed_s: float = np.nan


@dataclass(slots=True)
class LoadRecord:
    """An instance loads a version. `end_s` nan: under way; `failed` says why it did not work."""

    instance: int
    version: int
    begin_s: float
    donor: str | None
    end_s: float = np.nan
    failed: str = ""


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """The trainer cannot take what is ready: it waits for these older groups."""

    begin_s: float
    step: StepIndex
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Incident:
    """Something worth a mark: an instance came or went, the run was resumed, ..."""

    now_s: float
    kind: str
    instance: str
    text: str

    def as_json(self) -> dict[str, Any]:
        return {"now": self.now_s, "kind": self.kind, "instance": self.instance, "text": self.text}


class History:
    """Everything seen so far. Groups are indexed by their number, samples by `slot`."""

    def __init__(self) -> None:
        self.params = Params()
        self.names: dict[str, int] = {}  # instances, in the order of their coming
        self.slots_max: dict[str, int] = {}
        # `end` -1: outstanding; times nan and steps -1: not yet. `step` trained it.
        self.groups = Growing(
            version=("i4", -1), prompt=("i8", -1), issued_s=("f8", np.nan), ready_s=("f8", np.nan),
            fed_s=("f8", np.nan), fed_step=("i4", -1), ended_s=("f8", np.nan), end=("i1", -1),
            step=("i4", -1), finished=("i4", 0), scored=("i4", 0), reward_sum=("f8", 0),
            tokens=("i8", 0), moves=("i4", 0), mixed=("i4", 0),
        )  # fmt: skip
        self.samples = Growing(
            tokens=("i4", -1), reward=("f4", np.nan), finish=("i1", -1), finished_s=("f8", np.nan),
            instance=("i4", -1), mixed=("?", 0),
        )  # fmt: skip
        self.moves = Growing(
            now=("f8", 0), slot=("i4", 0), src=("i4", 0), dst=("i4", 0), num_bytes=("i8", 0),
            num_tokens=("i8", 0),
        )  # fmt: skip
        self.placements = Placements()
        self.steps: dict[StepIndex, StepRecord] = {}
        self.loads: list[LoadRecord] = []
        self.waits: list[WaitRecord] = []
        self.incidents: list[Incident] = []
        self.asleep: list[list[float]] = []  # instance, begin, end
        self.reasons: dict[int, str] = {}  # why groups ended, where one is given
        self.set_aside: dict[int, str] = {}  # prompts that are not issued again, and why
        self.stop: act.Stop | None = None
        self.committed = 0
        self.num_entries = 0
        self.now_s = 0.0  # of the last entry
        self._offsets: list[tuple[int, float]] = []
        self._loading: dict[tuple[int, int], LoadRecord] = {}
        self._sleeping: dict[int, float] = {}

    def instance(self, name: str) -> int:
        """The number of an instance."""
        return self.names.setdefault(name, len(self.names))

    def slot(self, group: int, sample: int) -> int:
        return group * self.params.group_size + sample

    def step(self, step: StepIndex) -> StepRecord:
        return self.steps.setdefault(step, StepRecord())

    def add(self, chunk: Columns) -> None:
        """The next whole lines of the log."""
        if not chunk.num_lines:
            return
        self._set_clock(chunk)
        for rare in chunk.rare:
            if type(rare.value) in (ev.Started, ev.Resumed):
                self.params = rare.value.params
        add_groups(self, chunk)
        add_samples(self, chunk)
        add_moves(self, chunk)
        for stays, lost in stays_of(self, chunk):
            self.placements.add(stays)
            if lost is not None:
                self.placements.lose(*lost)
        at, now = (np.array([getattr(r, name) for r in chunk.rare]) for name in ("at", "now"))
        times = self.seconds({"at": at, "now": now}).tolist()
        for rare, now_s in zip(chunk.rare, times, strict=True):
            self._see(rare.value, now_s)
        self.num_entries += chunk.num_lines
        self.now_s = chunk.now_last + self._offsets[-1][1]
        self._offsets = [(-1, self._offsets[-1][1])]

    # -- time -------------------------------------------------------------------------------------

    def _set_clock(self, chunk: Columns) -> None:
        """After a resume the controller's clock may be another one; ours goes on without a gap."""
        if not self._offsets:
            self._offsets = [(-1, -chunk.now_first)]
        for rare in chunk.rare:
            if type(rare.value) is ev.Resumed:
                last_s = rare.before + self._offsets[-1][1]
                last_s = self.now_s if np.isnan(rare.before) else last_s
                self._offsets.append((rare.at, last_s - rare.now))

    def seconds_at(self, at: int, now: float) -> float:
        return now + next(offset for place, offset in reversed(self._offsets) if place <= at)

    def seconds(self, table: Table) -> NDArray[np.float64]:
        """When the rows of a table happened."""
        if len(self._offsets) == 1:
            return table["now"] + self._offsets[0][1]
        places, offsets = (np.array(part) for part in zip(*self._offsets, strict=True))
        return table["now"] + offsets[np.searchsorted(places, table["at"], "right") - 1]

    def or_now(self, seconds: float) -> float:
        """The time of the last entry, for what has not happened yet."""
        return self.now_s if np.isnan(seconds) else seconds

    def ended_waits(self) -> Iterator[tuple[WaitRecord, float]]:
        """Each with its end: when the next group was fed."""
        fed = np.sort(self.groups["fed_s"][~np.isnan(self.groups["fed_s"])])
        for wait in self.waits:
            place = int(np.searchsorted(fed, wait.begin_s, "right"))
            yield wait, float(fed[place]) if place < len(fed) else self.now_s

    # -- what is rare -----------------------------------------------------------------------------

    def _see(self, value: Any, now_s: float) -> None:
        match value:
            case act.Load() | ev.Loaded() | ev.LoadFailed():
                self._see_load(value, now_s)
            case act.CloseStep():
                self.step(value.step).closed_s = now_s
            case ev.StepCommitted():
                self.step(value.step).committed_s = now_s
                self.committed = max(self.committed, value.step + 1)
            case ev.Rewound():
                self._rewind(value.version, now_s)
            case act.WaitFor():
                self.waits.append(WaitRecord(now_s, value.step, value.groups))
            case act.Sleep():
                self._sleeping[self.instance(value.instance)] = now_s
            case act.Wake():
                self._wake(self.instance(value.instance), now_s)
            case act.Stop():
                self.stop = value
            case _:
                self._see_incident(value, now_s)

    def _rewind(self, version: int, now_s: float) -> None:
        """Steps from there on are trained again: what they were before is undone."""
        text = f"back to version {version}, the last one on disk"
        self.incidents.append(Incident(now_s, "rewound", "learner", text))
        self.committed = min(self.committed, version)
        for record in [self.steps[step] for step in self.steps if step >= version]:
            record.closed_s = record.committed_s = np.nan

    def _see_load(self, value: act.Load | ev.Loaded | ev.LoadFailed, now_s: float) -> None:
        key = (self.instance(value.instance), value.version)
        if isinstance(value, act.Load):
            self._loading[key] = LoadRecord(*key, now_s, value.donor)
            self.loads.append(self._loading[key])
            return
        record = self._loading.pop(key, None)
        if record is not None:
            record.end_s = now_s
            record.failed = value.reason if isinstance(value, ev.LoadFailed) else ""

    def _wake(self, instance: int, now_s: float) -> None:
        since = self._sleeping.pop(instance, None)
        if since is not None:
            self.asleep.append([instance, since, now_s])

    def _see_incident(self, value: Any, now_s: float) -> None:
        kind, name, text = "", getattr(value, "instance", ""), getattr(value, "reason", "")
        match value:
            case ev.InstanceJoined():
                kind, text = "joined", f"life {value.life}"
                self.slots_max[name] = value.slots_max
                self.instance(name)
            case ev.InstanceLost() | act.Restart():
                kind = "lost" if isinstance(value, ev.InstanceLost) else "restarted"
                self._wake(self.instance(name), now_s)
                for key in [key for key in self._loading if key[0] == self.instance(name)]:
                    self._loading.pop(key).end_s = now_s
            case ev.TrainerLost() | act.RestartTrainer():
                kind, name = "trainer lost", "learner"
            case act.OptimizerRewound():
                kind, name = "optimizer rewound", "learner"
                text = f"to version {value.optimizer_version}"
            case ev.Resumed():
                kind, self.stop = "resumed", None
            case act.SetAside():
                kind, text = "set aside", f"prompt {value.prompt}: {value.reason}"
                self.set_aside[value.prompt] = value.reason
            case ev.SampleFailed() | ev.ScoreFailed() | ev.MoveFailed():
                request = value.request
                kind = type(value).__name__.removesuffix("Failed").lower() + " failed"
                text = f"group {request.group} sample {request.sample}: {value.reason}"
            case _:
                return
        self.incidents.append(Incident(now_s, kind, name, text))


def read_history(folder: Path) -> History:
    """The history of a whole log."""
    history = History()
    for read in read_columns(LogTail(folder)):
        history.add(read)
    return history


# -- what is frequent: whole tables at a time, never row by row ------------------------------------
# Each function puts one chunk of columns into the tables of a `History`. Late or repeated messages
# (of an instance that was given up, say) change nothing that is there.


ENDS = tuple(act.End)  # the code of an end is its place here
FINISHES = tuple(Finish)
_PLACES = {
    act.Unpark: Why.UNPARKED,
    act.Reversion: Why.REVERSED,
    ev.SampleFailed: Why.FAILED,
    act.Abort: Why.ABORTED,
}
_LOSSES = (ev.InstanceLost, act.Restart, ev.Resumed)


def _codes(texts: list[str], words: tuple[str, ...]) -> NDArray[Any]:
    """For each text its place among `words`, -1 if it is none of them."""
    return np.array([words.index(text) if text in words else -1 for text in texts] or [-1])


def add_groups(history: History, chunk: Columns) -> None:
    issued, groups = chunk.tables[act.IssueGroup], history.groups
    if len(issued["at"]):
        groups.reach(int(issued["group"].max()) + 1)
        history.samples.reach(len(groups) * history.params.group_size)
        at = issued["group"]
        groups["version"][at], groups["prompt"][at] = issued["version"], issued["prompt"]
        groups["issued_s"][at] = history.seconds(issued)
    fed = chunk.tables[act.Feed]
    now = history.seconds(fed)
    groups["fed_s"][fed["group"]], groups["fed_step"][fed["group"]] = now, fed["step"]
    steps, first = np.unique(fed["step"], return_index=True)
    for step, now_s in zip(steps.tolist(), now[first].tolist(), strict=True):
        record = history.step(step)
        record.fed_s = now_s if np.isnan(record.fed_s) else record.fed_s
    ended = chunk.tables[act.EndGroup]
    at = ended["group"]
    groups["ended_s"][at], groups["step"][at] = history.seconds(ended), ended["step"]
    groups["end"][at] = _codes(chunk.texts, ENDS)[ended["end"]]
    told = np.array([bool(text) for text in chunk.texts] or [False])[ended["reason"]]
    for group, code in zip(at[told].tolist(), ended["reason"][told].tolist(), strict=True):
        history.reasons[group] = chunk.texts[code]


def add_samples(history: History, chunk: Columns) -> None:
    groups, samples = history.groups, history.samples
    done, slots = _with_slots(history, chunk.tables[ev.SampleFinished])
    new = samples["tokens"][slots] < 0
    samples["tokens"][slots] = done["num_tokens"]
    samples["finish"][slots] = _codes(chunk.texts, FINISHES)[done["finish"]]
    samples["finished_s"][slots] = history.seconds(done)
    samples["instance"][slots] = _instances(history, chunk, done["instance"])
    samples["mixed"][slots] = done["segments"] > 1
    at = done["group"][new]
    _count(groups, "finished", at)
    _count(groups, "mixed", at, done["segments"][new] > 1)
    _count(groups, "tokens", at, done["num_tokens"][new])
    scored, slots = _with_slots(history, chunk.tables[ev.Scored])
    good = np.isnan(samples["reward"][slots]) & np.isfinite(scored["reward"])
    at = scored["group"][good]
    samples["reward"][slots[good]] = scored["reward"][good]
    _count(groups, "scored", at)
    _count(groups, "reward_sum", at, scored["reward"][good])
    groups["ready_s"][at] = history.seconds(scored)[good]  # the last of a group stays


def _count(groups: Growing, name: str, at: NDArray[Any], by: NDArray[Any] | None = None) -> None:
    """Add to a column at these groups, which may repeat. A chunk touches a short range of them."""
    if len(at):
        low = int(at.min())
        sums = np.bincount(at - low, by)
        column = groups[name][low : low + len(sums)]
        column += sums.astype(column.dtype)


def _with_slots(history: History, table: Table) -> tuple[Table, NDArray[Any]]:
    """The last row of every request, in the order of the log, and the requests' slots."""
    slots = table["group"] * history.params.group_size + table["sample"]
    keep = np.flatnonzero(slots < len(history.samples))
    if repeats(slots):  # a late or repeated message
        _, last = np.unique(slots[::-1], return_index=True)
        keep = np.intersect1d(keep, len(slots) - 1 - last)
    if len(keep) < len(slots):
        table, slots = {name: column[keep] for name, column in table.items()}, slots[keep]
    return table, slots


def repeats(slots: NDArray[Any]) -> bool:
    """Whether a request is there twice. Those of a chunk are mostly close to each other."""
    if len(slots) and np.ptp(slots) < 16 * len(slots):
        return bool((np.bincount(slots - slots.min()) > 1).any())
    ordered = np.sort(slots)
    return bool((ordered[1:] == ordered[:-1]).any())


def add_moves(history: History, chunk: Columns) -> None:
    moved = chunk.tables[ev.Moved]
    _count(history.groups, "moves", moved["group"])
    history.moves.extend(
        {
            "now": history.seconds(moved),
            "slot": moved["group"] * history.params.group_size + moved["sample"],
            "src": _instances(history, chunk, moved["src"]),
            "dst": _instances(history, chunk, moved["dst"]),
            "num_bytes": moved["num_bytes"],
            "num_tokens": moved["num_tokens"],
        }
    )


def _instances(history: History, chunk: Columns, codes: NDArray[Any]) -> NDArray[Any]:
    table = np.full(len(chunk.texts) + 1, -1)
    for code in np.flatnonzero(np.bincount(codes)).tolist():
        table[code] = history.instance(chunk.texts[code])
    return table[codes]


def stays_of(
    history: History, chunk: Columns
) -> Iterator[tuple[Rows, tuple[int | None, float] | None]]:
    """Placement rows in stretches; after each, the instance that was lost there (None: all)."""
    parts = [
        _dispatched(history, chunk),
        _plain_rows(history, chunk, ev.SampleFinished, "instance", Why.FINISHED),
        _plain_rows(history, chunk, ev.Moved, "dst", Why.MOVED),
        _plain_rows(history, chunk, act.Park, "instance", Why.PARKED),
    ]
    few = [_one(history, rare) for rare in chunk.rare if type(rare.value) in _PLACES]
    if few:
        parts.append(Rows(*(np.array(column) for column in zip(*few, strict=True))))
    rows = Rows.join(parts)
    begin = -1
    for rare in chunk.rare:
        if type(rare.value) in _LOSSES:
            here = (rows.at > begin) & (rows.at < rare.at)
            name = getattr(rare.value, "instance", None)
            lost = history.instance(name) if name is not None else None
            yield rows.at_places(here), (lost, history.seconds_at(rare.at, rare.now))
            begin = rare.at
    yield rows.at_places(rows.at > begin) if begin >= 0 else rows, None


def _dispatched(history: History, chunk: Columns) -> Rows:
    table = chunk.tables[act.Dispatch]
    codes = table["samples"]
    used = np.flatnonzero(np.bincount(codes))
    lists = [np.array(json.loads(f"[{chunk.texts[code]}]"), np.int64) for code in used]
    size_of, begin_of = np.zeros((2, len(chunk.texts) + 1), np.int64)
    size_of[used] = [len(one) for one in lists]
    begin_of[used] = np.cumsum(size_of[used]) - size_of[used]
    sizes = size_of[codes]
    which = np.repeat(np.arange(len(codes)), sizes)
    within = np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    samples = np.concatenate([*lists, np.zeros(0, np.int64)])[begin_of[codes][which] + within]
    slot = table["group"][which] * history.params.group_size + samples
    instance = _instances(history, chunk, table["instance"])[which]
    now = history.seconds(table)[which]
    why = np.full(len(which), Why.DISPATCHED)
    return Rows(table["at"][which], now, slot, instance, table["version"][which], why)


def _plain_rows(history: History, chunk: Columns, kind: type, where: str, why: Why) -> Rows:
    table = chunk.tables[kind]
    slot = table["group"] * history.params.group_size + table["sample"]
    instance = _instances(history, chunk, table[where])
    keep, reason = np.full(len(slot), KEEP), np.full(len(slot), why)
    return Rows(table["at"], history.seconds(table), slot, instance, keep, reason)


def _one(history: History, rare: Rare) -> tuple[float, ...]:
    """The columns of `Rows` for an event that is rare."""
    value = rare.value
    return (
        rare.at,
        history.seconds_at(rare.at, rare.now),
        history.slot(*value.request),
        history.instance(value.instance),
        getattr(value, "version", KEEP),
        int(_PLACES[type(value)]),
    )
