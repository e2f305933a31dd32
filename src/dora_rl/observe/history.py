"""The history of a run for people to look at: groups, samples, stays, steps, loads, incidents.

Built from the event log chunk by chunk, as it grows; the dashboard, `trace` and `plot` read it.
It only collects: whether promises were kept is `audit`'s part. Times are seconds of running: the
run begins at 0, and a pause between a stop and its resume counts as nothing. Memory is a few dozen
bytes per sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.observe.columns import Columns, Table
from dora_rl.observe.growing import Growing
from dora_rl.observe.history_rows import (
    add_groups,
    add_moves,
    add_samples,
    new_groups,
    new_moves,
    new_samples,
    stays_of,
)
from dora_rl.observe.placements import Placements
from dora_rl.types import StepIndex


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


class History:
    """Everything seen so far. Groups are indexed by their number, samples by `slot`."""

    def __init__(self) -> None:
        self.params = Params()
        self.names: dict[str, int] = {}  # instances, in the order of their coming
        self.slots_max: dict[str, int] = {}
        self.groups: Growing = new_groups()
        self.samples: Growing = new_samples()
        self.moves: Growing = new_moves()
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
        if step not in self.steps:
            self.steps[step] = StepRecord()
        return self.steps[step]

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
        if len(self._offsets) == 1:
            return now + self._offsets[0][1]
        return now + next(offset for place, offset in reversed(self._offsets) if place <= at)

    def seconds(self, table: Table) -> NDArray[np.float64]:
        """When the rows of a table happened."""
        if len(self._offsets) == 1:
            return table["now"] + self._offsets[0][1]
        places, offsets = (np.array(part) for part in zip(*self._offsets, strict=True))
        return table["now"] + offsets[np.searchsorted(places, table["at"], "right") - 1]

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
