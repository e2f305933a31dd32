"""`dora-rl audit RUN`: prove C1, C2, C3 and conservation from the event log alone.

Checkers read each entry, event first, then its actions in order: `audit_places` (where requests
are, who holds which weights), `audit_groups` (groups, samples, prompts that are set aside) and
`audit_steps` (batches, steps, the bound). They share books of their own (`audit_books`),
and with the core nothing but the event and action types. A run that was cut off can be audited too:
what is outstanding is no finding, but nothing is called proved (`AuditReport.proved`) before the
log ends with a completed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit_books import (
    LOG,
    AuditFigures,
    AuditReport,
    Books,
    Finding,
    Notebook,
    Promise,
)
from dora_rl.observe.audit_groups import FaultAudit, GroupAudit
from dora_rl.observe.audit_places import PlaceAudit
from dora_rl.observe.audit_steps import StepAudit
from dora_rl.observe.eventlog import ChainCheck, Entry, Snapshot, read
from dora_rl.types import GroupId, InstanceId

__all__ = [
    "AuditFigures",
    "AuditReport",
    "Auditor",
    "Finding",
    "Promise",
    "audit",
    "audit_run",
    "read_through",
]

Checks: TypeAlias = dict[type, tuple[Callable[[Any], None], ...]]
LEARNER = ""  # no instance has this name
# Who says what: the field that names the instance, or the learner.
_SPEAKERS: dict[type, str] = {
    ev.InstanceJoined: "instance",
    ev.InstanceLost: "instance",
    ev.InstanceReport: "instance",
    ev.Loaded: "instance",
    ev.LoadFailed: "instance",
    ev.SampleFinished: "instance",
    ev.SampleFailed: "instance",
    ev.Moved: "dst",
    ev.MoveFailed: "src",
    ev.TrainerJoined: LEARNER,
    ev.TrainerLost: LEARNER,
    ev.TrainerReport: LEARNER,
    ev.BatchAccepted: LEARNER,
    ev.StepCommitted: LEARNER,
    ev.VersionDurable: LEARNER,
}


def audit_run(folder: Path) -> AuditReport:
    """Audit the event log of a run."""
    return read_through(folder).report()


def read_through(folder: Path, *, keep: bool = False) -> Auditor:
    """An auditor that has read the whole log of a run."""
    auditor = Auditor(keep=keep)
    for record in read(folder, auditor.chain):
        auditor.see(record)
    return auditor


def audit(records: Iterable[Entry | Snapshot]) -> AuditReport:
    """Audit the entries of a run, from its first. Snapshots are not believed, only entries."""
    auditor = Auditor()
    for record in records:
        auditor.see(record)
    return auditor.report()


class Auditor:
    """Reads entries one by one; can also watch a run as it goes.

    Whoever reads lines shows each to `chain` before its record. With `keep` the books hold every
    trained sample, for a comparison with the files of the run.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self.notes = Notebook()
        self.chain = ChainCheck()
        self.books = Books(trained={} if keep else None)
        self.places = PlaceAudit(self.books, self.notes)
        self.groups = GroupAudit(self.books, self.notes)
        self.faults = FaultAudit(self.books, self.notes, self.places)
        self.steps = StepAudit(self.books, self.notes)
        self.late = LateMessages()
        self.stop: act.Stop | None = None
        self.num_resumes = 0
        self.num_killed = 0  # lives that another followed, and that have no stop
        self.num_mismatched = 0  # samples that are not what their version gives
        self.num_imported = self.bytes_imported = 0  # requests that came over, even too late
        self.now = -math.inf
        self._on_event = self._event_checks()
        self._on_action = self._action_checks()

    def _event_checks(self) -> Checks:
        places, groups, steps = self.places, self.groups, self.steps
        return {
            ev.Started: (steps.on_started,),
            ev.Resumed: (
                self._on_resumed,
                self.late.on_resumed,
                places.on_resumed,
                steps.on_started,
            ),
            ev.InstanceJoined: (self.faults.on_joined, places.on_joined),
            ev.InstanceLost: (self.faults.on_lost, places.on_lost),
            ev.Continued: (self.faults.on_continued,),
            ev.Loaded: (places.on_load_end,),
            ev.LoadFailed: (places.on_load_end,),
            ev.SampleFinished: (places.on_finished,),
            ev.SampleFailed: (places.on_failed,),
            ev.Moved: (places.on_moved,),
            ev.MoveFailed: (places.on_move_failed,),
            ev.Scored: (groups.on_scored,),
            ev.ScoreFailed: (groups.on_score_failed,),
            ev.Recomputed: (groups.on_recomputed,),
            ev.BatchAccepted: (steps.on_accepted,),
            ev.StepCommitted: (steps.on_committed,),
            ev.VersionDurable: (steps.on_durable,),
            ev.Rewound: (steps.on_rewound,),
            ev.TrainerJoined: (steps.on_trainer_joined,),
            ev.TrainerLost: (steps.on_trainer_lost,),
        }

    def _action_checks(self) -> Checks:
        places, groups, steps = self.places, self.groups, self.steps
        return {
            act.IssueGroup: (self.faults.on_issue, groups.on_issue),
            act.Dispatch: (places.on_dispatch,),
            act.Abort: (places.on_abort,),
            act.Load: (self.late.on_load, places.on_load),
            act.Unload: (places.on_unload,),
            act.Move: (self.late.on_move, places.on_move),
            act.Park: (places.on_park,),
            act.Unpark: (places.on_continue,),
            act.Reversion: (places.on_reversion, places.on_continue),
            act.Sleep: (places.on_sleep,),
            act.Wake: (places.on_wake,),
            act.Restart: (self.faults.on_lost, places.on_lost),
            act.RestartTrainer: (steps.on_trainer_lost,),
            act.Score: (groups.on_score,),
            act.Feed: (steps.on_feed,),
            act.CloseStep: (steps.on_close,),
            act.EndGroup: (self.late.on_end, places.on_end, self.faults.on_end, groups.on_end),
            act.SetAside: (self.faults.on_set_aside,),
            act.RetireVersion: (steps.on_retire,),
            act.WaitFor: (groups.on_wait_for,),
            act.InForce: (steps.on_in_force,),
            act.Stop: (self._on_stop,),
        }

    def see(self, record: Entry | Snapshot) -> None:
        """Check one record; of a snapshot, only that it is chained."""
        if self.chain.problem:
            name = f"entry {record.number}"
            name = name if isinstance(record, Entry) else f"snapshot before {name}"
            self.notes.add(LOG, name, self.chain.problem)
        if isinstance(record, Entry):
            self._see(record)

    def _see(self, entry: Entry) -> None:
        notes = self.notes
        expected = notes.entry + 1
        notes.entry, notes.event, notes.finished = entry.number, entry.event, None
        if entry.number != expected:
            notes.add(LOG, f"entry {expected}", f"missing: {entry.number} comes instead")
        if (entry.number == 0) != isinstance(entry.event, ev.Started):
            notes.add(LOG, f"entry {entry.number}", "the run starts once, at entry 0")
        if entry.now < self.now and not isinstance(entry.event, ev.Resumed):
            notes.add(LOG, f"entry {entry.number}", "is older than the entry before it")
        self.now = entry.now
        self._count(entry.event)
        if self.stop is not None and not isinstance(entry.event, ev.Resumed):
            if entry.actions:
                notes.add(LOG, f"entry {entry.number}", "actions after the stop")
            return  # nothing is believed after the stop, by the core neither
        if not self.late.is_late(entry.event):  # the core does not believe it either
            for check in self._on_event.get(type(entry.event), ()):
                check(entry.event)
        for action in entry.actions:
            for check in self._on_action.get(type(action), ()):
                check(action)
        self.steps.settle()

    def _count(self, event: ev.Event) -> None:
        """What the run itself counts as it comes, for a comparison with its summary."""
        if isinstance(event, ev.Moved):
            self.num_imported += 1
            self.bytes_imported += event.num_bytes
        elif isinstance(event, ev.Recomputed):
            self.num_mismatched += not event.is_same

    def _on_resumed(self, _event: ev.Resumed) -> None:
        self.num_killed += self.stop is None
        self.stop = None
        self.num_resumes += 1

    def _on_stop(self, action: act.Stop) -> None:
        self.stop = action

    def report(self) -> AuditReport:
        """What was found in the entries so far."""
        done = self.stop is not None and self.stop.done
        self.steps.finish(done)
        self.groups.keep_committed(self.steps.unsaved)
        notes = self.notes
        return AuditReport(tuple(notes.found), notes.num, self._figures(done))

    def _figures(self, done: bool) -> AuditFigures:
        books, tally = self.books, self.books.tally
        stale_max = max(tally.staleness, default=0)
        ends = {end: tally.ends.get(end, 0) for end in act.End}
        return AuditFigures(
            mode=books.params.mode.value,
            num_entries=self.notes.entry + 1,
            num_resumes=self.num_resumes,
            steps=books.committed,
            groups_issued=books.num_issued,
            groups_trained=ends[act.End.TRAINED],
            groups_filtered=ends[act.End.FILTERED],
            groups_failed=ends[act.End.FAILED],
            groups_surplus=ends[act.End.SURPLUS],
            groups_outstanding=len(books.live),
            groups_discarded=sum(
                ends[end] for end in (act.End.FAILED, act.End.SURPLUS, act.End.LOST)
            ),
            groups_lost=ends[act.End.LOST],
            num_rewound=books.lineage,
            samples_trained=tally.samples,
            samples_masked=tally.masked,
            tokens_trained=tally.tokens,
            discarded_tokens=tally.discarded_tokens,
            staleness_mean=tally.staleness_sum / max(1, tally.samples),
            staleness_max=stale_max,
            staleness_counts=tuple(tally.staleness.get(s, 0) for s in range(stale_max + 1)),
            mixed_version_frac=tally.mixed / max(1, tally.samples),
            batch_sizes=tuple(self.steps.batch_sizes),
            live_versions_max=self.steps.live_versions_max,
            migrations=self.places.num_moved,
            kv_bytes_moved=self.places.kv_bytes_moved,
            finished=done,
            set_aside=tuple(sorted(self.faults.set_aside)),
            stopped=self.stop.reason if self.stop is not None else "",
            num_recomputed=tally.recomputed,
            recomputed_gap_max=tally.gap_max,
            num_chained=self.chain.num_chained,
            num_unchained=self.chain.num_unchained,
        )


class LateMessages:
    """Which messages of a log came late or twice. Told of every event and action, in order.

    By the definition of `core.events`: a worker's message counts if it is of the incarnation that
    joined last (or of a newer one, for a join or a loss), and an answer counts if it is to the last
    order. What is not known (-1, in logs of earlier releases) counts.
    """

    def __init__(self) -> None:
        self._newest: dict[InstanceId, int] = {}
        self._loads: dict[InstanceId, int] = {}
        self._moves: dict[GroupId, dict[int, int]] = {}  # by sample

    def is_late(self, event: Any) -> bool:
        """Asked once for each event; what is not late is remembered."""
        speaker = _SPEAKERS.get(type(event))
        if speaker is None:
            return False
        name = getattr(event, speaker) if speaker else LEARNER
        match event:
            case ev.InstanceJoined():
                return not self._begins(name, event.life, 1)
            case ev.TrainerJoined():
                return not self._begins(name, event.incarnation, 1)
            case ev.InstanceLost() | ev.TrainerLost():
                return not self._begins(name, event.incarnation, 0)
            case _ if event.incarnation >= 0 and event.incarnation != self._newest.get(name, -1):
                return True
            case ev.Loaded() | ev.LoadFailed():
                return event.attempt not in (-1, self._loads.get(name, -1))
            case ev.Moved() | ev.MoveFailed():
                asked = self._moves.get(event.request.group, {})
                return event.attempt not in (-1, asked.get(event.request.sample, -1))
            case _:
                return False

    def _begins(self, name: InstanceId, incarnation: int, more: int) -> bool:
        newest = self._newest.get(name, -1)
        if incarnation >= newest + more:
            self._newest[name] = incarnation
            return True
        return incarnation < 0

    def on_resumed(self, _event: ev.Resumed) -> None:
        self._newest.clear()

    def on_load(self, action: act.Load) -> None:
        self._loads[action.instance] = action.attempt

    def on_move(self, action: act.Move) -> None:
        self._moves.setdefault(action.request.group, {})[action.request.sample] = action.attempt

    def on_end(self, action: act.EndGroup) -> None:
        self._moves.pop(action.group, None)
