"""The auditor of steps: batches of exactly B, commits in order, K and B in force, the bound, C3.

Arithmetic of its own. A take shows in the log when the group is fed, which may be later than it
was taken. Taking never makes the invariant easier (it costs a place, and frees one only for
versions that are not older), so the invariant over what the log shows is implied by the true one,
and the two are the same whenever a step closes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit_books import (
    BATCH,
    C1,
    C2,
    C3,
    CONSERVATION,
    LOG,
    VERSIONS,
    Checker,
    GroupRecord,
)
from dora_rl.observe.audit_groups import gave_up
from dora_rl.types import GroupId, Mode, StepIndex

_FIXED_STALENESS = {Mode.SYNC: 0, Mode.ONE_STEP_OFF: 1, Mode.REPLICATION: 0}


@dataclass(eq=False)
class StepAudit(Checker):
    """Each step trains exactly B groups, once and in order, none of them too old.

    `fed`: with their updates, to the learner's step since the learner joined; `ahead`: to the step
    after it. `closed` is the batch of the step in training, `unsaved` those of committed steps.
    """

    has_learner: bool = False
    fed: dict[GroupId, int] = field(default_factory=dict[GroupId, int])
    ahead: dict[GroupId, int] = field(default_factory=dict[GroupId, int])
    closed: tuple[GroupId, ...] | None = None
    unsaved: dict[StepIndex, tuple[GroupId, ...]] = field(
        default_factory=dict[StepIndex, tuple[GroupId, ...]]
    )
    is_resuming: bool = False  # nothing runs yet: the run may go back to a durable version
    close_sent: bool = False
    checksums: dict[StepIndex, str] = field(default_factory=dict[StepIndex, str])
    batch_sizes: list[int] = field(default_factory=list[int])

    def on_started(self, event: ev.Started | ev.Resumed) -> None:
        old, new = self.books.params, event.params
        self.check(
            not isinstance(event, ev.Resumed)
            or (old.mode, old.group_size) == (new.mode, new.group_size),
            LOG,
            f"entry {self.findings.entry}",
            f"resumed as {new.mode} with groups of {new.group_size}; the run is {old.mode} "
            f"with groups of {old.group_size}",
        )
        if not old.durable_behind:
            self.books.on_disk = self.books.committed
        self.books.params, self.books.config = new, event.config
        self.has_learner = False
        self.is_resuming = isinstance(event, ev.Resumed)
        self._end_durable()

    def on_in_force(self, action: act.InForce) -> None:
        books, wanted = self.books, self._asked_for()
        given = (action.max_staleness, action.batch_groups)
        before = {(old.max_staleness, old.batch_groups) for old in books.in_force[-1:]}
        self.check(
            given in {wanted} | before,
            C3,
            f"step {action.step}",
            f"K, B = {given} in force, {wanted} were asked",
        )
        self.check(
            action.step == books.filling,
            C3,
            f"step {action.step}",
            f"K, B set while {books.filling} is filled",
        )
        for record in books.live.values():  # what was fed already is cut into updates anew
            record.update = None if record.step == action.step else record.update
        books.in_force.append(action)
        books.dirty = True

    def _asked_for(self) -> tuple[int, int]:
        """K and B, by the parameters of the run."""
        params = self.books.params
        return _FIXED_STALENESS.get(params.mode, params.max_staleness), params.batch_groups

    def on_feed(self, action: act.Feed) -> None:
        books = self.books
        name, record = f"group {action.group}", books.live.get(action.group)
        if record is None:
            self.add(BATCH, name, f"fed to step {action.step} and is not outstanding")
            return
        ahead = action.step == books.committed + 1
        fed = self.ahead if ahead else self.fed
        self.check(
            self.has_learner and (action.step == books.committed or ahead),
            BATCH,
            name,
            f"fed to step {action.step}, {books.committed} is next",
        )
        self.check(
            not ahead or (self.close_sent and books.filling == action.step),
            BATCH,
            name,
            f"fed to step {action.step} before step {books.committed} was closed and held",
        )
        self.check(
            action.version == record.version,
            C1,
            name,
            f"issued on {record.version}, fed as {action.version}",
        )
        if record.step not in (None, action.step):
            self.add(BATCH, name, f"in the batches of {record.step} and {action.step}")
        elif action.group in fed:
            self.add(BATCH, name, f"fed twice to step {action.step}")
        self._check_samples(name, record, action)
        if record.step is None:
            record.step = action.step
            books.untaken[record.version] -= 1
            books.taken += action.step == books.filling
            books.dirty = True
        elif record.update not in (None, action.update):
            self.add(BATCH, name, f"fed to update {record.update}, then to update {action.update}")
        record.update = action.update
        fed[action.group] = action.update
        record.fed = action.samples

    def _check_samples(self, name: str, record: GroupRecord, action: act.Feed) -> None:
        scored = [s for s, sample in enumerate(record.samples) if sample.reward is not None]
        self.check(
            all(sample in scored for sample in action.samples),
            C2,
            name,
            "fed with samples that were not finished and scored",
        )
        needed = self.books.params.samples_needed
        distinct = len(set(action.samples)) == len(action.samples)
        self.check(
            distinct and len(action.samples) >= min(needed, len(record.samples)),
            C2,
            name,
            f"fed with samples {action.samples}, {needed} are needed",
        )
        for place, sample in enumerate(record.samples):
            if place not in action.samples and not gave_up(sample, self.books):
                self.add(C2, name, f"fed without sample {place}, which did not fail")

    def on_close(self, action: act.CloseStep) -> None:
        name, size = f"step {action.step}", self.books.force(action.step).batch_groups
        odd = sorted(set(self.fed) ^ set(action.groups)) or list(action.groups)
        per_update = [*self.fed.values()]
        counts = {per_update.count(update) for update in set(per_update)}
        for holds, message in (
            (action.step == self.books.committed, f"closed while {self.books.committed} is next"),
            (
                len(action.groups) == size and len(set(action.groups)) == size,
                f"closed with {len(action.groups)} groups, not {size}",
            ),
            (
                tuple(self.fed) == action.groups,
                f"closed is not what was fed: groups {odd[:5]}",
            ),
            (
                self.closed is None or self.closed == action.groups,
                "closed again with other groups",
            ),
            (
                len(counts) <= 1 and per_update == sorted(per_update),
                "its optimizer updates have unequal shares",
            ),
        ):
            self.check(holds, BATCH, name, message)
        self.closed, self.close_sent = action.groups, True

    def on_accepted(self, event: ev.BatchAccepted) -> None:
        if event.step == self.books.filling and self.close_sent:
            self._next_step()

    def _next_step(self) -> None:
        self.books.filling += 1
        self.books.taken, self.books.dirty = 0, True

    def on_committed(self, event: ev.StepCommitted) -> None:
        books = self.books
        if self.checksums.setdefault(event.step, event.checksum) != event.checksum:
            self.add(BATCH, f"step {event.step}", "committed twice, with different weights")
        elif books.weights.setdefault(event.step + 1, event.checksum) != event.checksum:
            self.add(
                VERSIONS,
                f"version {event.step + 1}",
                "instances loaded other weights than were committed",
            )
        books.metrics.setdefault(event.step, event.metrics)
        if event.step == books.filling and self.close_sent:
            self._next_step()  # whoever has trained a batch held it
        if event.step == books.committed and books.filling > event.step:
            self.check(
                not books.params.durable_behind or event.durable >= event.step,
                VERSIONS,
                f"version {event.step + 1}",
                f"sealed when only version {event.durable} was on disk",
            )
            books.on_disk = max(books.on_disk, event.step)
            self._commit()

    def on_durable(self, event: ev.VersionDurable) -> None:
        self.books.on_disk = max(self.books.on_disk, event.version)
        self._end_durable()

    def _end_durable(self) -> None:
        """Groups of steps that nothing can undo any more end in this entry."""
        books = self.books
        for step in [step for step in self.unsaved if step < books.durable]:
            books.expected |= dict.fromkeys(self.unsaved.pop(step), step)

    def on_rewound(self, event: ev.Rewound) -> None:
        """The host was lost: what was committed and not durable is undone, and nothing else."""
        books, version = self.books, event.version
        name = f"version {version}"
        self.check(self.is_resuming, VERSIONS, name, "went back to while the run was going on")
        text = f"went back to, {books.committed} is newest and {books.durable} durable"
        if not self.check(books.durable <= version < books.committed, VERSIONS, name, text):
            return
        self.closed = self.unsaved.pop(version, None)
        self.unsaved.clear()
        self.fed, self.ahead, self.close_sent = {}, {}, False
        for record in books.live.values():
            if record.step is not None and record.step > version:
                record.step = record.update = None
                books.untaken[record.version] += 1
        for step in range(version, books.committed):
            self.checksums.pop(step, None)
            books.metrics.pop(step, None)
            books.weights.pop(step + 1, None)
            self.batch_sizes.pop()
        books.committed, books.filling, books.taken = version, version + 1, 0
        books.figures.num_rewound += 1
        books.dirty = True

    def on_learner_joined(self, event: ev.LearnerJoined) -> None:
        books = self.books
        self.has_learner, self.is_resuming = True, False
        books.on_disk = max(books.on_disk, event.durable)
        self._end_durable()
        self.fed, self.ahead, self.close_sent = {}, {}, False
        if event.version == books.committed + 1 and self.closed is not None:
            if books.filling == books.committed:
                self._next_step()
            self._commit()
        elif event.version != books.committed:
            self.add(VERSIONS, f"version {event.version}", f"joined, {books.committed} is newest")

    def on_learner_lost(self, _event: object) -> None:
        self.has_learner = False

    def _commit(self) -> None:
        groups = self.closed or ()
        self.unsaved[self.books.committed] = groups
        self.batch_sizes.append(len(groups))
        self.closed, self.close_sent = None, False
        self.fed, self.ahead = self.ahead, {}
        self.books.committed += 1
        self._end_durable()

    def on_retire(self, action: act.RetireVersion) -> None:
        books = self.books
        name, version = f"version {action.version}", action.version
        if books.unended[version]:
            left = [g for g, record in books.live.items() if record.version == version]
            self.add(VERSIONS, name, f"retired before groups {left[:5]} ended")
        else:
            books.unended.pop(version, None)
            books.untaken.pop(version, None)
        self.check(
            version < books.durable and version not in books.retired,
            VERSIONS,
            name,
            "retired, and it is the newest on disk, newer or retired already",
        )
        books.retired.add(version)

    def settle(self) -> None:
        """The laws that hold between entries."""
        books = self.books
        for group, step in books.expected.items():
            self.add(C2, f"group {group}", f"in the batch of step {step}, did not end")
        books.expected.clear()
        if not books.in_force:
            self.add(C3, f"entry {self.findings.entry}", "no K and B are in force")
            books.in_force.append(act.InForce(0, *self._asked_for()))
        if not books.dirty:
            return
        books.dirty = False
        self.check(
            books.figures.groups_issued == len(books.live) + len(books.ended),
            CONSERVATION,
            "groups",
            "issued is not outstanding plus ended",
        )
        older = sum(1 for v, n in books.unended.items() if n and v != books.committed)
        books.figures.live_versions_max = max(books.figures.live_versions_max, older + 1)
        if books.params.mode is not Mode.REPLICATION:
            self._check_bound()

    def _check_bound(self) -> None:
        """u(<= w) <= f + B * (d(w) - s) for every version w >= s - K."""
        books = self.books
        force, step = books.in_force[-1], books.filling
        staleness, batch = force.max_staleness, force.batch_groups
        total, last = 0, books.params.num_steps - 1
        for version, count in sorted(books.untaken.items()):
            total += count
            places = batch - books.taken + batch * (min(version + staleness, last) - step)
            if count and version < step - staleness:
                self.add(C3, f"version {version}", f"{count} groups missed their deadline")
            elif version >= step - staleness and total > places:
                self.add(
                    C3,
                    f"version {version}, step {step}, group {max(books.live, default=0)}",
                    f"{total} untaken groups up to it, {places} places by their deadline",
                )

    def finish(self, done: bool) -> None:
        """A completed run leaves nothing over. One that was cut off may."""
        books = self.books
        for group in books.live if done else ():
            self.add(C2, f"group {group}", "never ended")
        self.check(
            not done or books.committed == books.params.num_steps,
            BATCH,
            f"step {books.committed}",
            f"the run ended: {books.committed} of {books.params.num_steps} steps were committed",
        )
        self.check(
            not done or books.durable == books.committed,
            VERSIONS,
            f"version {books.committed}",
            f"the run ended, and only version {books.durable} is known to be on disk",
        )
