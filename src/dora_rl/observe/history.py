"""The history of a run for people to look at: groups, samples, stays, steps, loads, incidents.

Built from the event log chunk by chunk, as it grows; the dashboard, `trace` and `plot` read it.
It only collects: whether promises were kept is `audit`'s part. Times are seconds of running: the
run begins at 0, and a pause between a stop and its resume counts as nothing. Memory is a few dozen
bytes per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.observe.columns import Columns, Growing, LogTail, Table, joined_tables, rows_of
from dora_rl.observe.measures import smoothed_rates
from dora_rl.observe.placements import KEEP, ROW, Placements, Why
from dora_rl.types import Finish, StepIndex

ENDS = tuple(act.End)  # the code of an end is its place here
FINISHES = tuple(Finish)
_WHY = {
    ev.SampleFinished: Why.FINISHED,
    ev.Moved: Why.MOVED,
    act.Park: Why.PARKED,
    act.Unpark: Why.UNPARKED,
    act.Reversion: Why.REVERSED,
    ev.SampleFailed: Why.FAILED,
    act.Abort: Why.ABORTED,
}
_LOSSES = (ev.InstanceLost, act.Restart, ev.Resumed)


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
    """The learner cannot take what is ready: it waits for these older groups."""

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
        self.holds: list[tuple[float, act.HoldBack]] = []  # at most one a step
        self.incidents: list[Incident] = []
        self.asleep: list[list[float]] = []  # instance, begin, end
        self.reasons: dict[int, str] = {}  # why groups ended, where one is given
        self.set_aside: dict[int, str] = {}  # prompts that are not issued again, and why
        self.stop: act.Stop | None = None
        self.committed = 0
        self.num_entries = 0
        self.now_s = 0.0  # of the last entry
        self.began_at = np.nan  # what the controller's clock showed at the first entry
        self._offset = np.nan  # from the controller's clock to ours
        self._lives: dict[str, int] = {}
        self._loading: dict[tuple[int, int], LoadRecord] = {}
        self._sleeping: dict[int, float] = {}

    def instance(self, name: str) -> int:
        """The number of an instance."""
        return self.names.setdefault(name, len(self.names))

    def slot(self, group: Any, sample: Any) -> Any:
        """Numbers or arrays of them."""
        return group * self.params.group_size + sample

    def step(self, step: StepIndex) -> StepRecord:
        return self.steps.setdefault(step, StepRecord())

    def trained(self) -> NDArray[np.bool_]:
        """Which groups were trained."""
        return self.groups["end"] == ENDS.index(act.End.TRAINED)

    def add(self, chunk: Columns) -> None:
        """The next whole lines of the log."""
        if not chunk.num_lines:
            return
        for rare in chunk.rare:
            if type(rare.value) in (ev.Started, ev.Resumed):
                self.params = rare.value.params
        seconds = self._seconds(chunk)
        tables = {
            kind: self._resolved(table, seconds, chunk.texts)
            for kind, table in chunk.tables.items()
        }
        add_groups(self, tables, chunk.texts)
        add_samples(self, tables, chunk.texts)
        self._add_stays(chunk, tables, seconds)
        for rare in chunk.rare:
            self._see(rare.value, float(seconds[rare.at]))
        self.num_entries += chunk.num_lines

    # -- time, instances and requests -------------------------------------------------------------

    def _seconds(self, chunk: Columns) -> NDArray[np.float64]:
        """When everything in a chunk happened, by our clock. After a resume the controller's clock
        may be another one; ours goes on without a gap."""
        if np.isnan(self._offset):
            self.began_at = float(chunk.times[0])
            self._offset = -self.began_at
        seconds = chunk.times + self._offset
        for at, value in chunk.rare:
            if type(value) is ev.Resumed:
                before = float(seconds[at - 1]) if at else self.now_s
                self._offset = before - float(chunk.times[at])
                seconds[at:] = chunk.times[at:] + self._offset
        self.now_s = float(seconds[-1])
        return seconds

    def _resolved(self, table: Table, seconds: NDArray[np.float64], texts: list[str]) -> Table:
        """A table of a chunk with our times and slots, and numbers where it has names."""
        found = table | {"now": seconds[table["at"]]}
        if "sample" in table:
            found["slot"] = self.slot(table["group"], table["sample"])
        for name in ("instance", "src", "dst"):
            if name in table:
                found[name] = _numbers(table[name], texts, self.instance)
        return found

    def curves(self) -> dict[str, NDArray[np.float64]]:
        """Over steps, from the log alone; nan where a step has no time yet."""
        groups, trained = self.groups, self.trained()
        step = groups["step"][trained]
        num = max(self.committed, int(step.max(initial=-1)) + 1)

        def summed(values: NDArray[Any]) -> NDArray[np.float64]:
            return np.bincount(step, values, num).astype(np.float64)

        stale = (step - groups["version"][trained]).astype(np.int64)
        most = np.zeros(num)
        np.maximum.at(most, step, stale)
        tokens, samples = (summed(groups[name][trained]) for name in ("tokens", "scored"))
        done = np.array([self.steps.get(s, StepRecord()).committed_s for s in range(num)])
        took = np.diff(done, prepend=np.nanmin(groups["issued_s"], initial=np.inf))
        return {
            "reward/mean": summed(groups["reward_sum"][trained]) / np.maximum(1, samples),
            "staleness/mean": summed(stale) / np.maximum(1, np.bincount(step, minlength=num)),
            "staleness/max": most,
            "response_length/mean": tokens / np.maximum(1, samples),
            "time/step": took,
            "perf/tokens_per_s": np.array(
                smoothed_rates(tokens.tolist(), took.tolist()), np.float64
            ),
        }

    def or_now(self, seconds: float) -> float:
        """The time of the last entry, for what has not happened yet."""
        return self.now_s if np.isnan(seconds) else seconds

    def ended_waits(self) -> Iterator[tuple[WaitRecord, float]]:
        """Each with its end: when the next group was fed."""
        fed = np.sort(self.groups["fed_s"][~np.isnan(self.groups["fed_s"])])
        for wait in self.waits:
            place = int(np.searchsorted(fed, wait.begin_s, "right"))
            yield wait, float(fed[place]) if place < len(fed) else self.now_s

    # -- where requests are -----------------------------------------------------------------------

    def _add_stays(
        self, chunk: Columns, tables: dict[type, Table], seconds: NDArray[np.float64]
    ) -> None:
        """In stretches: a lost instance ends every stay on it."""
        rows, begin = self._stay_rows(chunk, tables, seconds), 0
        for at, value in chunk.rare:
            joined = isinstance(value, ev.InstanceJoined) and self._begins_new_life(value)
            if joined or isinstance(value, _LOSSES):
                self.placements.add(rows_of(rows, (rows["at"] >= begin) & (rows["at"] < at)))
                name = getattr(value, "instance", None)
                lost = None if name is None else self.instance(name)
                self.placements.lose(lost, float(seconds[at]))
                begin = at
        self.placements.add(rows_of(rows, rows["at"] >= begin) if begin else rows)

    def _begins_new_life(self, joined: ev.InstanceJoined) -> bool:
        """An instance that comes back begins with nothing, also where nobody saw it go."""
        before, self._lives[joined.instance] = self._lives.get(joined.instance), joined.life
        return before not in (None, joined.life)

    def _stay_rows(
        self, chunk: Columns, tables: dict[type, Table], seconds: NDArray[np.float64]
    ) -> Table:
        few = [
            (at, float(seconds[at]), self.slot(*value.request), self.instance(value.instance),
             getattr(value, "version", KEEP), _WHY[type(value)])
            for at, value in chunk.rare if type(value) in _WHY
        ]  # fmt: skip
        found = np.array(few, ROW)
        parts = [{name: found[name] for name, _ in ROW}]
        for kind, why in ((act.Dispatch, Why.DISPATCHED), *_WHY.items()):
            if (table := tables.get(kind)) is not None:
                version, reason = np.full_like(table["at"], KEEP), np.full_like(table["at"], why)
                rest = {"instance": table["dst"]} if kind is ev.Moved else {}
                parts.append({"version": version, "why": reason} | table | rest)
        return joined_tables(parts)

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
            case act.HoldBack():
                self.holds.append((now_s, value))
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
        self.incidents.append(
            Incident(
                now_s, "rewound", "learner", f"back to version {version}, the last one on disk"
            )
        )
        self.committed = min(self.committed, version)
        for record in [self.steps[step] for step in self.steps if step >= version]:
            record.closed_s = record.committed_s = np.nan

    def _see_load(self, value: act.Load | ev.Loaded | ev.LoadFailed, now_s: float) -> None:
        key = (self.instance(value.instance), value.version)
        if isinstance(value, act.Load):
            self._loading[key] = LoadRecord(*key, now_s, value.donor)
            self.loads.append(self._loading[key])
            return
        if (record := self._loading.pop(key, None)) is not None:
            record.end_s = now_s
            record.failed = value.reason if isinstance(value, ev.LoadFailed) else ""

    def _wake(self, instance: int, now_s: float) -> None:
        if (since := self._sleeping.pop(instance, None)) is not None:
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
            case ev.LearnerLost() | act.RestartLearner():
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
    for read in LogTail(folder).columns():
        history.add(read)
    return history


# -- what is frequent: whole tables at a time, never row by row ------------------------------------
# Each function puts the tables of a chunk into those of a `History`. Late or repeated messages
# (of an instance that was given up, say) change nothing that is there.


def _numbers(
    codes: NDArray[Any], texts: list[str], number_of: Callable[[str], int]
) -> NDArray[np.int64]:
    """What the texts of a column stand for; each is asked for once."""
    table = np.full(len(texts) + 1, -1)
    for code in np.flatnonzero(np.bincount(codes)).tolist():
        table[code] = number_of(texts[code])
    return table[codes]


def add_groups(history: History, tables: dict[type, Table], texts: list[str]) -> None:
    groups = history.groups
    issued, fed, ended = (tables[kind] for kind in (act.IssueGroup, act.Feed, act.EndGroup))
    at = issued["group"]
    groups.reach(int(at.max(initial=-1)) + 1)
    history.samples.reach(len(groups) * history.params.group_size)
    groups["version"][at], groups["prompt"][at] = issued["version"], issued["prompt"]
    groups["issued_s"][at] = issued["now"]
    groups["fed_s"][fed["group"]], groups["fed_step"][fed["group"]] = fed["now"], fed["step"]
    steps, first = np.unique(fed["step"], return_index=True)
    for step, now_s in zip(steps.tolist(), fed["now"][first].tolist(), strict=True):
        record = history.step(step)
        record.fed_s = now_s if np.isnan(record.fed_s) else record.fed_s
    at = ended["group"]
    groups["ended_s"][at], groups["step"][at] = ended["now"], ended["step"]
    groups["end"][at] = _numbers(ended["end"], texts, lambda text: _place(text, ENDS))
    for group, code in zip(at.tolist(), ended["reason"].tolist(), strict=True):
        if texts[code]:
            history.reasons[group] = texts[code]


def _place(text: str, words: tuple[str, ...]) -> int:
    """-1 for a word that another release wrote."""
    return words.index(text) if text in words else -1


def add_samples(history: History, tables: dict[type, Table], texts: list[str]) -> None:
    groups, samples = history.groups, history.samples
    done = _last_of_each(history, tables[ev.SampleFinished])
    slots, mixed = done["slot"], done["segments"] > 1
    new = samples["tokens"][slots] < 0
    samples["tokens"][slots] = done["num_tokens"]
    samples["finish"][slots] = _numbers(done["finish"], texts, lambda text: _place(text, FINISHES))
    samples["finished_s"][slots], samples["instance"][slots] = done["now"], done["instance"]
    samples["mixed"][slots] = mixed
    at = done["group"][new]
    _count(groups, "finished", at)
    _count(groups, "mixed", at, mixed[new])
    _count(groups, "tokens", at, done["num_tokens"][new])
    scored = _last_of_each(history, tables[ev.Scored])
    slots = scored["slot"]
    scored = rows_of(scored, np.isnan(samples["reward"][slots]) & np.isfinite(scored["reward"]))
    at = scored["group"]
    samples["reward"][scored["slot"]] = scored["reward"]
    _count(groups, "scored", at)
    _count(groups, "reward_sum", at, scored["reward"])
    groups["ready_s"][at] = scored["now"]  # the last of a group stays
    moved = tables[ev.Moved]
    _count(groups, "moves", moved["group"])
    history.moves.extend(moved)


def _count(groups: Growing, name: str, at: NDArray[Any], by: NDArray[Any] | None = None) -> None:
    """Add to a column at these groups, which may repeat. A chunk touches a short range of them."""
    if len(at):
        low = int(at.min())
        sums = np.bincount(at - low, by)
        column = groups[name][low : low + len(sums)]
        column += sums.astype(column.dtype)


def _last_of_each(history: History, table: Table) -> Table:
    """The last row of every request that is known, in the order of the log."""
    slots = table["slot"]
    keep = np.flatnonzero(slots < len(history.samples))
    if repeats(slots):  # a late or repeated message
        _, last = np.unique(slots[::-1], return_index=True)
        keep = np.intersect1d(keep, len(slots) - 1 - last)
    return rows_of(table, keep) if len(keep) < len(slots) else table


def repeats(slots: NDArray[Any]) -> bool:
    """Whether a request is there twice. Those of a chunk are mostly close to each other."""
    if len(slots) and np.ptp(slots) < 16 * len(slots):
        return bool((np.bincount(slots - slots.min()) > 1).any())
    return bool((np.diff(np.sort(slots)) == 0).any())
