"""The auditors of groups: C1 by the engine's own segments, C2, who may be admitted, and that no
prompt is set aside without its evidence in the log.

They recount from the log what the core claims, and share only the event and action types with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit_books import (
    BATCH,
    C1,
    C2,
    C3,
    PROMPTS,
    VERSIONS,
    Books,
    GroupRecord,
    Notebook,
    Sample,
    TrainedSample,
)
from dora_rl.observe.audit_places import PlaceAudit
from dora_rl.types import GroupId, InstanceId, Mode, RequestId, Segment, StepIndex

TOO_LATE = "in time"  # a reward that did not answer; no event tells of it


def gave_up(sample: Sample, books: Books) -> bool:
    """Whether the events allow that this sample was given up.

    That the last attempt at scoring it took too long shows in no event of its own.
    """
    overdue = sample.reward is None and sample.asked + 1 >= books.params.attempts_max
    return sample.failed or overdue


class GroupAudit:
    """Every group is issued once and ends once; what is trained was decoded and scored properly."""

    def __init__(self, books: Books, notes: Notebook) -> None:
        self.books, self.notes = books, notes
        self.add, self.check = notes.add, notes.check
        self.prompts: dict[int, GroupId] = {}
        self.next_prompt = 0
        self.owed: dict[int, None] = {}  # prompts of failed groups, not issued again yet
        self.next_group: GroupId = 0

    def on_issue(self, action: act.IssueGroup) -> None:
        books = self.books
        name, version = f"group {action.group}", action.version
        if action.group in books.live or action.group in books.ended:
            self.add(C2, name, "issued twice")
            return
        self.check(
            action.group == self.next_group,
            C2,
            name,
            f"issued while group {self.next_group} is next",
        )
        self.next_group = action.group + 1
        self.check(
            action.step == books.filling,
            C2,
            name,
            f"issued for step {action.step}, not {books.filling}",
        )
        self._check_prompt(action)
        staleness_max = books.force(books.filling).max_staleness
        if version > books.committed or version in books.retired:
            self.add(VERSIONS, name, f"issued on version {version}, which is not live")
        elif version != books.committed and version + staleness_max <= books.filling:
            self.add(C3, name, f"issued on version {version}, due in the step in filling")
        elif version < books.filling - staleness_max:
            self.add(C3, name, f"issued on version {version}, too old already")
        samples = [Sample() for _ in range(books.params.group_size)]
        books.live[action.group] = GroupRecord(version, action.prompt, samples)
        books.untaken[version] += 1
        books.unended[version] += 1
        books.num_issued += 1
        books.dirty = True

    def _check_prompt(self, action: act.IssueGroup) -> None:
        """The next of the stream, or one that a failed group still owes."""
        name, prompt = f"group {action.group}", action.prompt
        earlier = self.prompts.get(prompt)
        if prompt in self.owed:
            del self.owed[prompt]
        elif earlier is not None:
            text = f"prompt {prompt} was issued already as group {earlier}"
            self.add(PROMPTS, name, text)
        elif prompt != self.next_prompt:
            text = f"issued with prompt {prompt}, {self.next_prompt} is next"
            self.add(PROMPTS, name, text)
        self.next_prompt = max(self.next_prompt, prompt + 1)
        self.prompts[prompt] = action.group

    def on_score(self, action: act.Score) -> None:
        record, name = self.books.live.get(action.request.group), f"group {action.request.group}"
        if record is None or action.request.sample >= len(record.samples):
            self.add(C2, name, f"scoring of sample {action.request.sample} it has not")
            return
        sample = record.samples[action.request.sample]
        label = f"sample {action.request.sample}"
        event = self.notes.event
        if action.prompt != record.prompt:
            text = f"{label} is scored for prompt {action.prompt}, not {record.prompt}"
            self.add(PROMPTS, name, text)
        if isinstance(event, ev.Tick) and action.attempt > sample.asked >= 0:
            sample.unscored(TOO_LATE, self.books.params.attempts_max)
        if sample.asked < 0:
            if isinstance(event, ev.SampleFinished) and self.notes.finished == action.request:
                sample.num_tokens, sample.digest = event.num_tokens, event.digest
                sample.segments, sample.finish = event.segments, event.finish.value
                self._check_segments(name, label, record, event.segments, sample)
            else:
                self.add(C2, name, f"{label} is to be scored and has not finished")
        elif self._asked_twice(sample, action):
            self.add(C2, name, f"{label} counts as finished or scored twice")
        sample.asked = action.attempt

    def _asked_twice(self, sample: Sample, action: act.Score) -> bool:
        """After a resume what is still open is asked for again."""
        again = isinstance(self.notes.event, ev.Resumed)
        return action.attempt < sample.asked + (not again) or sample.reward is not None

    def _check_segments(
        self,
        name: str,
        label: str,
        record: GroupRecord,
        segments: tuple[Segment, ...],
        sample: Sample,
    ) -> None:
        versions = [segment.version for segment in segments]
        sample.mixed = len(segments) != 1
        if self.books.params.mode is Mode.PARTIAL:
            proper = (
                bool(segments)
                and segments[0].start == 0
                and record.version <= versions[0]
                and versions == sorted(set(versions))
                and versions[-1] <= self.books.committed
            )
        else:
            proper = segments == (Segment(0, record.version),)
        if not proper:
            text = f"{label} was decoded as {[tuple(s) for s in segments]}"
            self.add(C1, name, f"{text}, its version is {record.version}")

    def on_scored(self, event: ev.Scored) -> None:
        record = self.books.live.get(event.request.group)
        if record is None or event.request.sample >= len(record.samples):
            return  # late: the group has ended
        sample = record.samples[event.request.sample]
        if not 0 <= event.attempt <= sample.asked or sample.reward is not None:
            return  # a late answer counts too: it is about the same tokens
        if math.isfinite(event.reward):
            sample.reward = event.reward
        else:
            sample.unscored(f"reward is {event.reward}", self.books.params.attempts_max)

    def on_score_failed(self, event: ev.ScoreFailed) -> None:
        record = self.books.live.get(event.request.group)
        if record is None or event.request.sample >= len(record.samples):
            return  # late: the group has ended
        sample = record.samples[event.request.sample]
        if sample.asked == event.attempt and sample.reward is None:
            sample.unscored(event.reason, self.books.params.attempts_max)

    def on_recomputed(self, event: ev.Recomputed) -> None:
        """Another path has computed the sample again under the version that the log names."""
        name, tally = f"group {event.request.group}", self.books.tally
        tally.recomputed += 1
        tally.gap_max = max(tally.gap_max, event.gap_max)
        record = self.books.live.get(event.request.group)
        known = record.samples[event.request.sample : event.request.sample + 1] if record else ()
        # What the engine's own segments name; that they may is checked where it finished.
        self.check(
            all([s.version for s in sample.segments] == [event.version] for sample in known),
            C1,
            name,
            f"computed again under version {event.version}",
        )
        if not event.is_same:
            text = f"sample {event.request.sample} is not what version {event.version} gives:"
            gaps = f"{event.gap_mean:.2g} apart on average, {event.gap_max:.2g} at most"
            self.add(C1, name, f"{text} log-probs {gaps}, tolerance {event.tolerance:g}")

    def on_wait_for(self, action: act.WaitFor) -> None:
        for group in action.groups:
            record = self.books.live.get(group)
            self.check(
                record is not None and record.step is None,
                C3,
                f"group {group}",
                "waited for, and it is not outstanding",
            )

    def on_end(self, action: act.EndGroup) -> None:
        books = self.books
        name = f"group {action.group}"
        record = books.live.pop(action.group, None)
        if record is None:
            known = action.group in books.ended
            text = f"ended twice, now as {action.end}" if known else "ended and was never issued"
            self.add(C2, name, text)
            return
        self.check(
            action.version == record.version,
            C1,
            name,
            f"issued on {record.version}, ended on {action.version}",
        )
        books.ended[action.group] = action.end
        books.tally.ends[action.end] += 1
        books.unended[record.version] -= 1
        if record.step is None:
            books.untaken[record.version] -= 1
        if action.end is act.End.TRAINED:
            self._check_trained(name, record, action)
        else:
            self._check_untrained(name, record, action)
        books.dirty = True

    def _check_trained(self, name: str, record: GroupRecord, action: act.EndGroup) -> None:
        step = self.books.expected.pop(action.group, None)
        if step is None or step != action.step:
            self.add(BATCH, name, f"trained in step {action.step}, not in its batch")
            return
        staleness, limit = step - record.version, self.books.force(step).max_staleness
        self.check(
            0 <= staleness <= limit,
            C3,
            name,
            f"trained at staleness {staleness}, {limit} is allowed",
        )
        tally = self.books.tally
        tally.staleness[staleness] += 1
        fed = self.books.fed_samples.pop(action.group, ())
        self._check_rewards(name, record)
        self.keep(action.group, step, record, fed)
        trained = [sample for s, sample in enumerate(record.samples) if s in fed]
        tally.samples += len(trained)
        tally.staleness_sum += staleness * len(trained)
        tally.masked += len(record.samples) - len(trained)
        tally.mixed += sum(sample.mixed for sample in trained)
        tokens = sum(sample.num_tokens for sample in trained)
        tally.tokens += tokens
        # A sample that failed is left out; what it had generated is discarded.
        tally.discarded_tokens += sum(sample.num_tokens for sample in record.samples) - tokens

    def _check_rewards(self, name: str, record: GroupRecord) -> None:
        rewards = {s.reward for s in record.samples if s.reward is not None}
        self.check(
            not self.books.params.filter_equal or len(rewards) != 1,
            C2,
            name,
            "trained with equal rewards, which are to be filtered",
        )

    def keep_committed(self, batches: Mapping[StepIndex, tuple[GroupId, ...]]) -> None:
        """Of a run that stopped between a step's commit and its version's way to the disk: the
        files of the run tell of these steps, and their groups have not ended."""
        for step, groups in batches.items():
            for group in groups:
                record = self.books.live.get(group)
                if record is not None:
                    self.keep(group, step, record, self.books.fed_samples.get(group, ()))

    def keep(
        self, group: GroupId, step: StepIndex, record: GroupRecord, fed: tuple[int, ...]
    ) -> None:
        """For a comparison with the files of the run, if one was asked for."""
        trained = self.books.trained
        if trained is None:
            return
        for place in fed:
            if place < len(record.samples):
                s = record.samples[place]
                facts = (s.num_tokens, s.reward, s.digest, s.segments, s.finish)
                found = TrainedSample(step, record.version, record.prompt, *facts)
                trained[RequestId(group, place)] = found

    def _check_untrained(self, name: str, record: GroupRecord, action: act.EndGroup) -> None:
        self.check(
            record.step is None, C2, name, f"fed to step {record.step}, then ended as {action.end}"
        )
        self.check(action.step is None, C2, name, f"ended as {action.end} by step {action.step}")
        self.check(
            action.end is not act.End.SURPLUS or self.books.params.mode is Mode.REPLICATION,
            C2,
            name,
            "dropped as surplus, which only replication may do",
        )
        if action.end is act.End.FILTERED:
            rewards = {s.reward for s in record.samples if s.reward is not None}
            settled = all(s.reward is not None or gave_up(s, self.books) for s in record.samples)
            self.check(
                self.books.params.filter_equal and len(rewards) == 1 and settled,
                C2,
                name,
                "filtered by a rule that does not apply to it",
            )
        else:
            self.books.tally.discarded_tokens += sum(s.num_tokens for s in record.samples)
        if action.end is act.End.LOST:
            self._check_lost(name, record)
        if not action.reason:
            self.add(C2, name, f"ended as {action.end} without a reason")
        elif action.end is act.End.FAILED:
            self._check_failed(name, record, action)

    def _check_lost(self, name: str, record: GroupRecord) -> None:
        """Only with a version that was lost with its host. Where K or B has changed, also for want
        of a place; the `partial` baseline moves a group to newer versions."""
        event, books = self.notes.event, self.books
        self.owed[record.prompt] = None
        with_version = isinstance(event, ev.Rewound) and record.version > event.version
        changed = len({(f.max_staleness, f.batch_groups) for f in books.in_force}) > 1
        may = changed or books.params.mode is Mode.PARTIAL
        self.check(
            with_version or (isinstance(event, ev.Rewound) and may),
            C2,
            name,
            f"ended as lost, its version {record.version} is not",
        )

    def _killers(self, record: GroupRecord, group: GroupId) -> list[Sample]:
        """Samples whose instance was lost so often while nothing else ran there."""
        params, alone = self.books.params, self.books.alone
        return [
            sample
            for number, sample in enumerate(record.samples)
            if params.losses_max and alone.get(RequestId(group, number), 0) >= params.attempts_max
        ]

    def _check_failed(self, name: str, record: GroupRecord, action: act.EndGroup) -> None:
        """Only what the events say can fail a group, and with their words."""
        self.owed[record.prompt] = None
        failed = [s for s in record.samples if gave_up(s, self.books)]
        spare = len(record.samples) - self.books.params.samples_needed
        if len(failed) <= spare and (killers := self._killers(record, action.group)):
            failed = killers  # one sample that ends its instance ends its group
        elif len(failed) <= spare:
            text = f"ended as failed ({action.reason}), and {len(failed)} of its samples have"
            self.add(C2, name, text)
            return
        causes = [cause for s in failed for cause in s.causes]
        if isinstance(self.notes.event, ev.Tick):
            causes.append(TOO_LATE)
        self.check(
            any(cause in action.reason for cause in causes),
            C2,
            name,
            f"failed because {action.reason!r}, which no event says; they say {causes[:3]}",
        )


class FaultAudit:
    """Every prompt that is set aside had its attempts, and is not issued again.

    Counts the failed groups of each prompt, and for each request the losses of an instance on which
    nothing else ran. A request that went on with more tokens than before starts from zero.
    """

    def __init__(self, books: Books, notes: Notebook, places: PlaceAudit) -> None:
        self.books, self.places = books, places
        self.check = notes.check
        self.set_aside: dict[int, str] = {}
        self.failures: Counter[int] = Counter()  # failed groups of prompts that are not settled
        self.last_failed: dict[int, GroupId] = {}
        self.alone = books.alone
        self.kept: dict[RequestId, int] = {}

    # Before `places` forgets who was there.

    def on_joined(self, event: ev.InstanceJoined) -> None:
        known = self.places.instances.get(event.instance)
        if known is not None and known.life != event.life:
            self._lost(event.instance)

    def on_lost(self, event: ev.InstanceLost | act.Restart) -> None:
        self._lost(event.instance)

    def _lost(self, name: InstanceId) -> None:
        instance = self.places.instances.get(name)
        if instance is None:
            return
        at_work = [r for r, place in instance.requests.items() if not place.parked]
        if len(at_work) == 1:
            self.alone[at_work[0]] += 1

    def on_continued(self, event: ev.Continued) -> None:
        known = event.request.group in self.books.live
        if known and event.num_tokens > self.kept.get(event.request, 0):
            self.kept[event.request] = event.num_tokens
            self.alone.pop(event.request, None)

    # Before `groups` forgets the group.

    def on_issue(self, action: act.IssueGroup) -> None:
        self.check(
            action.prompt not in self.set_aside,
            C2,
            f"prompt {action.prompt}",
            f"issued as group {action.group} after it was set aside",
        )

    def on_end(self, action: act.EndGroup) -> None:
        record = self.books.live.get(action.group)
        if record is None:
            return
        if action.end is act.End.FAILED:
            self.failures[record.prompt] += 1
            self.last_failed[record.prompt] = action.group
        elif action.end is not act.End.LOST:  # its prompt comes again, with what it has against it
            self.failures.pop(record.prompt, None)
            self.last_failed.pop(record.prompt, None)
        for sample in range(len(record.samples)):
            request = RequestId(action.group, sample)
            self.kept.pop(request, None)
            if action.end is not act.End.FAILED:
                self.alone.pop(request, None)

    def on_set_aside(self, action: act.SetAside) -> None:
        params, prompt = self.books.params, action.prompt
        self.check(
            self.last_failed.get(prompt) == action.group,
            C2,
            f"prompt {prompt}",
            f"set aside for group {action.group}, which did not fail last",
        )
        self.check(prompt not in self.set_aside, C2, f"prompt {prompt}", "set aside twice")
        failures = self.failures.pop(prompt, 0)
        self.check(
            failures == action.failures,
            C2,
            f"prompt {prompt}",
            f"{failures} of its groups failed, not {action.failures}",
        )
        samples = range(params.group_size)
        losses = [self.alone.pop(RequestId(action.group, s), 0) for s in samples]
        self.check(
            not action.kills or max(losses) >= params.attempts_max,
            C2,
            f"prompt {prompt}",
            f"set aside after {max(losses)} lost instances that it had alone"
            f", {params.attempts_max} are needed",
        )
        self.check(
            action.kills or 0 < params.group_failures_max <= failures,
            C2,
            f"prompt {prompt}",
            f"set aside after {failures} failed groups, {params.group_failures_max} are needed",
        )
        self.check(action.reason, C2, f"prompt {prompt}", "set aside without a reason")
        self.set_aside[prompt] = action.reason
        self.last_failed.pop(prompt, None)
