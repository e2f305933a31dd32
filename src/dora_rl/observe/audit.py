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
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
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
    Findings,
    Promise,
)
from dora_rl.observe.audit_groups import GroupAudit
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
    ev.LearnerJoined: LEARNER,
    ev.LearnerLost: LEARNER,
    ev.LearnerReport: LEARNER,
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
        self.findings = Findings()
        self.chain = ChainCheck()
        self.books = Books(trained={} if keep else None)
        self.places = PlaceAudit(self.books, self.findings)
        self.groups = GroupAudit(self.books, self.findings)
        self.steps = StepAudit(self.books, self.findings)
        self.late = LateMessages()
        self.stop: act.Stop | None = None
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
            ev.InstanceJoined: (places.on_joined,),
            ev.InstanceLost: (places.on_lost,),
            ev.Continued: (groups.on_continued,),
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
            ev.LearnerJoined: (steps.on_learner_joined,),
            ev.LearnerLost: (steps.on_learner_lost,),
        }

    def _action_checks(self) -> Checks:
        places, groups, steps = self.places, self.groups, self.steps
        return {
            act.IssueGroup: (groups.on_issue,),
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
            act.Restart: (places.on_lost,),
            act.RestartLearner: (steps.on_learner_lost,),
            act.Score: (groups.on_score,),
            act.Feed: (steps.on_feed,),
            act.CloseStep: (steps.on_close,),
            act.EndGroup: (self.late.on_end, places.on_end, groups.on_end),
            act.SetAside: (groups.on_set_aside,),
            act.RetireVersion: (steps.on_retire,),
            act.WaitFor: (groups.on_wait_for,),
            act.HoldBack: (groups.on_hold_back,),
            act.InForce: (steps.on_in_force,),
            act.Stop: (self._on_stop,),
        }

    def see(self, record: Entry | Snapshot) -> None:
        """Check one record; of a snapshot, only that it is chained."""
        is_entry = isinstance(record, Entry)
        if self.chain.problem:
            what = "entry" if is_entry else "snapshot before entry"
            self.findings.add(LOG, f"{what} {record.number}", self.chain.problem)
        if is_entry:
            self._see(record)

    def _see(self, entry: Entry) -> None:
        findings, name = self.findings, f"entry {entry.number}"
        expected, resumes = findings.entry + 1, isinstance(entry.event, ev.Resumed)
        findings.entry, findings.event, findings.finished = entry.number, entry.event, None
        if entry.number != expected:
            findings.add(LOG, f"entry {expected}", f"missing: {entry.number} comes instead")
        if (entry.number == 0) != isinstance(entry.event, ev.Started):
            findings.add(LOG, name, "the run starts once, at entry 0")
        findings.check(
            entry.now >= self.now or resumes, LOG, name, "is older than the entry before it"
        )
        self.now = entry.now
        self._count(entry.event)
        if self.stop is not None and not resumes:
            findings.check(not entry.actions, LOG, name, "actions after the stop")
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
        self.books.figures.num_resumes += 1

    def _on_stop(self, action: act.Stop) -> None:
        self.stop = action

    def report(self) -> AuditReport:
        """What was found in the entries so far."""
        done = self.stop is not None and self.stop.done
        self.steps.finish(done)
        self.groups.keep_committed(self.steps.unsaved)
        return AuditReport(tuple(self.findings.kept), self.findings.num, self._figures(done))

    def _figures(self, done: bool) -> AuditFigures:
        books, counted = self.books, self.books.figures
        ends, samples = Counter(books.ended.values()), max(1, counted.samples_trained)
        stale_max = max(books.staleness, default=0)
        return replace(
            counted,
            mode=books.params.mode.value,
            num_entries=self.findings.entry + 1,
            steps=books.committed,
            groups_trained=ends[act.End.TRAINED],
            groups_filtered=ends[act.End.FILTERED],
            groups_failed=ends[act.End.FAILED],
            groups_surplus=ends[act.End.SURPLUS],
            groups_lost=ends[act.End.LOST],
            groups_outstanding=len(books.live),
            groups_discarded=ends[act.End.FAILED] + ends[act.End.SURPLUS] + ends[act.End.LOST],
            staleness_mean=books.staleness_sum / samples,
            staleness_max=stale_max,
            staleness_counts=tuple(books.staleness[s] for s in range(stale_max + 1)),
            mixed_version_frac=books.num_mixed / samples,
            batch_sizes=tuple(self.steps.batch_sizes),
            finished=done,
            set_aside=tuple(sorted(self.groups.set_aside)),
            stopped=self.stop.reason if self.stop is not None else "",
            num_chained=self.chain.num_chained,
            num_unchained=self.chain.num_unchained,
        )


@dataclass(eq=False)
class LateMessages:
    """Which messages of a log came late or twice. Told of every event and action, in order.

    By the definition of `core.events`: a worker's message counts if it is of the incarnation that
    joined last (or of a newer one, for a join or a loss), and an answer counts if it is to the last
    order. What is not known (-1, in logs of earlier releases) counts.
    """

    _newest: dict[InstanceId, int] = field(default_factory=dict[InstanceId, int])
    _loads: dict[InstanceId, int] = field(default_factory=dict[InstanceId, int])
    _moves: dict[GroupId, dict[int, int]] = field(  # by sample
        default_factory=dict[GroupId, dict[int, int]]
    )

    def is_late(self, event: Any) -> bool:
        """Asked once for each event; what is not late is remembered."""
        if (speaker := _SPEAKERS.get(type(event))) is None:
            return False
        name = getattr(event, speaker) if speaker else LEARNER
        newest = self._newest.get(name, -1)
        match event:
            case ev.InstanceJoined(life=incarnation) | ev.LearnerJoined(incarnation=incarnation):
                self._newest[name] = max(incarnation, newest)
                return 0 <= incarnation <= newest
            case ev.InstanceLost() | ev.LearnerLost():
                self._newest[name] = max(event.incarnation, newest)
                return 0 <= event.incarnation < newest
            case _ if event.incarnation >= 0 and event.incarnation != newest:
                return True
            case ev.Loaded() | ev.LoadFailed():
                return event.attempt not in (-1, self._loads.get(name, -1))
            case ev.Moved() | ev.MoveFailed():
                asked = self._moves.get(event.request.group, {})
                return event.attempt not in (-1, asked.get(event.request.sample, -1))
            case _:
                return False

    def on_resumed(self, _event: ev.Resumed) -> None:
        self._newest.clear()

    def on_load(self, action: act.Load) -> None:
        self._loads[action.instance] = action.attempt

    def on_move(self, action: act.Move) -> None:
        self._moves.setdefault(action.request.group, {})[action.request.sample] = action.attempt

    def on_end(self, action: act.EndGroup) -> None:
        self._moves.pop(action.group, None)
