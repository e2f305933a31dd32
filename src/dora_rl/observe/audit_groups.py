"""The auditor of groups and samples: C1 by the engine's own segments, C2, and who may be admitted.

Recounts from the log what the core claims; shares only the event and action types with it.
"""

from __future__ import annotations

import math

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit_books import Books, GroupRecord, Sample
from dora_rl.observe.audit_report import Notebook, Promise
from dora_rl.types import GroupId, Mode, Segment


class GroupAudit:
    """Every group is issued once and ends once; what is trained was decoded and scored properly."""

    def __init__(self, books: Books, notes: Notebook) -> None:
        self.books = books
        self.notes = notes
        self.prompts: dict[int, GroupId] = {}

    def on_issue(self, action: act.IssueGroup) -> None:
        books = self.books
        name, version = f"group {action.group}", action.version
        if action.group in books.live or action.group in books.ended:
            self._add(Promise.C2, name, "issued twice")
            return
        if action.step != books.filling:
            self._add(Promise.C2, name, f"issued for step {action.step}, not {books.filling}")
        self._check_prompt(action)
        staleness_max = books.force(books.filling).max_staleness
        if version > books.committed or version in books.retired:
            self._add(Promise.VERSIONS, name, f"issued on version {version}, which is not live")
        elif version != books.committed and version + staleness_max <= books.filling:
            self._add(Promise.C3, name, f"issued on version {version}, due in the step in filling")
        elif version < books.filling - staleness_max:
            self._add(Promise.C3, name, f"issued on version {version}, too old already")
        samples = [Sample() for _ in range(books.params.group_size)]
        books.live[action.group] = GroupRecord(version, action.prompt, samples)
        books.untaken[version] = books.untaken.get(version, 0) + 1
        books.unended[version] = books.unended.get(version, 0) + 1
        books.num_issued += 1
        books.dirty = True

    def _check_prompt(self, action: act.IssueGroup) -> None:
        earlier = self.prompts.get(action.prompt)
        if earlier is not None and self.books.ended.get(earlier) is not act.End.FAILED:
            self._add(
                Promise.C2,
                f"group {action.group}",
                f"prompt {action.prompt} was issued already as group {earlier}",
            )
        self.prompts[action.prompt] = action.group

    def on_score(self, action: act.Score) -> None:
        record, name = self.books.live.get(action.request.group), f"group {action.request.group}"
        if record is None or action.request.sample >= len(record.samples):
            self._add(Promise.C2, name, f"scoring of sample {action.request.sample} it has not")
            return
        sample = record.samples[action.request.sample]
        label = f"sample {action.request.sample}"
        event = self.notes.event
        if sample.asked < 0:
            if isinstance(event, ev.SampleFinished) and self.notes.finished == action.request:
                sample.num_tokens = event.num_tokens
                self._check_segments(name, label, record, event.segments, sample)
            else:
                self._add(Promise.C2, name, f"{label} is to be scored and has not finished")
        elif action.attempt <= sample.asked or sample.reward is not None:
            self._add(Promise.C2, name, f"{label} counts as finished or scored twice")
        sample.asked = action.attempt

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
            self._add(Promise.C1, name, f"{text}, its version is {record.version}")

    def on_scored(self, event: ev.Scored) -> None:
        record = self.books.live.get(event.request.group)
        if record is None or event.request.sample >= len(record.samples):
            return  # late: the group has ended
        sample = record.samples[event.request.sample]
        asked = 0 <= event.attempt <= sample.asked and sample.reward is None
        if asked and math.isfinite(event.reward):
            sample.reward = event.reward

    def on_wait_for(self, action: act.WaitFor) -> None:
        for group in action.groups:
            record = self.books.live.get(group)
            if record is None or record.step is not None:
                self._add(Promise.C3, f"group {group}", "waited for, and it is not outstanding")

    def on_end(self, action: act.EndGroup) -> None:
        books = self.books
        name = f"group {action.group}"
        record = books.live.pop(action.group, None)
        if record is None:
            known = action.group in books.ended
            text = f"ended twice, now as {action.end}" if known else "ended and was never issued"
            self._add(Promise.C2, name, text)
            return
        if action.version != record.version:
            self._add(Promise.C1, name, f"issued on {record.version}, ended on {action.version}")
        books.ended[action.group] = action.end
        ends = books.tally.ends
        ends[action.end] = ends.get(action.end, 0) + 1
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
            self._add(Promise.BATCH, name, f"trained in step {action.step}, not in its batch")
            return
        staleness, limit = step - record.version, self.books.force(step).max_staleness
        if not 0 <= staleness <= limit:
            self._add(Promise.C3, name, f"trained at staleness {staleness}, {limit} is allowed")
        tally = self.books.tally
        tally.staleness[staleness] = tally.staleness.get(staleness, 0) + 1
        fed = self.books.fed_samples.pop(action.group, ())
        trained = [sample for s, sample in enumerate(record.samples) if s in fed]
        tally.samples += len(trained)
        tally.masked += len(record.samples) - len(trained)
        tally.mixed += sum(sample.mixed for sample in trained)
        tally.tokens += sum(sample.num_tokens for sample in trained)

    def _check_untrained(self, name: str, record: GroupRecord, action: act.EndGroup) -> None:
        if record.step is not None:
            self._add(Promise.C2, name, f"fed to step {record.step}, then ended as {action.end}")
        if action.step is not None:
            self._add(Promise.C2, name, f"ended as {action.end} by step {action.step}")
        if action.end is act.End.SURPLUS and self.books.params.mode is not Mode.REPLICATION:
            self._add(Promise.C2, name, "dropped as surplus, which only replication may do")
        if action.end is act.End.FILTERED:
            rewards = {s.reward for s in record.samples if s.reward is not None}
            if not self.books.params.filter_equal or len(rewards) != 1:
                self._add(Promise.C2, name, "filtered by a rule that does not apply to it")
        else:
            self.books.tally.discarded_tokens += sum(s.num_tokens for s in record.samples)
        if not action.reason:
            self._add(Promise.C2, name, f"ended as {action.end} without a reason")

    def _add(self, promise: Promise, subject: str, message: str) -> None:
        self.notes.add(promise, subject, message)
