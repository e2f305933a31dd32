"""The auditor of groups: C1 by the engine's own segments, C2, who may be admitted, and that no
prompt is set aside without its evidence in the log.

It recounts from the log what the core claims, and shares only the event and action types with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

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
    Checker,
    GroupRecord,
    Sample,
    TrainedSample,
)
from dora_rl.types import GroupId, Mode, RequestId, Segment, StepIndex

TOO_LATE = "in time"  # a reward that did not answer; no event tells of it


def gave_up(sample: Sample, books: Books) -> bool:
    """Whether the events allow that this sample was given up.

    That the last attempt at scoring it took too long shows in no event of its own.
    """
    overdue = sample.reward is None and sample.asked + 1 >= books.params.attempts_max
    return sample.failed or overdue


@dataclass(eq=False)
class GroupAudit(Checker):
    """Every group is issued once and ends once; what is trained was decoded and scored properly.

    Every prompt that is set aside had its attempts, and is not issued again. For that it counts the
    failed groups of each prompt.
    """

    prompts: dict[int, GroupId] = field(default_factory=dict[int, GroupId])
    next_prompts: dict[int, int] = field(default_factory=dict[int, int])  # of each pool
    num_drawn: int = 0  # prompts, without those that were issued again
    drawn_at: dict[int, int] = field(default_factory=dict[int, int])  # the last of each pool
    # Prompts of failed groups, not issued again yet.
    owed: dict[int, None] = field(default_factory=dict[int, None])
    next_group: GroupId = 0
    set_aside: dict[int, str] = field(default_factory=dict[int, str])
    # By prompt, until one of its groups has not: the failed group, and the most instances that
    # one of its samples lost alone.
    failed: dict[int, list[tuple[GroupId, int]]] = field(
        default_factory=dict[int, list[tuple[GroupId, int]]]
    )

    def on_issue(self, action: act.IssueGroup) -> None:
        books = self.books
        name, version = f"group {action.group}", action.version
        self.check(
            action.prompt not in self.set_aside,
            C2,
            f"prompt {action.prompt}",
            f"issued as group {action.group} after it was set aside",
        )
        known = action.group in books.live or action.group in books.ended
        if not self.check(not known, C2, name, "issued twice"):
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
        self._check_prompt(name, action)
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
        books.figures.groups_issued += 1
        books.dirty = True

    def _check_prompt(self, name: str, action: act.IssueGroup) -> None:
        """The next of the stream, or one that a failed group still owes."""
        prompt = action.prompt
        if prompt in self.owed:
            del self.owed[prompt]
        elif prompt in self.prompts:
            earlier = self.prompts[prompt]
            self.add(PROMPTS, name, f"prompt {prompt} was issued already as group {earlier}")
        else:
            self._check_pool(name, prompt)
        self.prompts[prompt] = action.group

    def _check_pool(self, name: str, prompt: int) -> None:
        """Prompts of a pool come in order, and no pool waits too long. Without a curriculum there
        is one pool."""
        params = self.books.params
        pools = max(1, params.pools)
        pool = prompt % pools
        following = self.next_prompts.get(pool, pool)
        if prompt != following:
            self.add(PROMPTS, name, f"issued with prompt {prompt}, {following} is next")
        self.next_prompts[pool] = max(following, prompt) + pools
        # As `curriculum` promises: credit for a prompt comes in so many rounds of all pools.
        least = params.pool_share_min * min(params.pool_weights, default=1.0)
        limit = (math.ceil(1 / least) + 1) * pools
        waited = self.num_drawn - self.drawn_at.get(pool, 0)
        if pools > 1 and waited > limit:
            self.add(PROMPTS, name, f"pool {pool} waited for {waited} prompts, {limit} at most")
        self.num_drawn += 1
        self.drawn_at[pool] = self.num_drawn

    def on_score(self, action: act.Score) -> None:
        name, label = f"group {action.request.group}", f"sample {action.request.sample}"
        if (sample := self.books.sample(action.request)) is None:
            self.add(C2, name, f"scoring of {label} it has not")
            return
        event, record = self.findings.event, self.books.live[action.request.group]
        if action.prompt != record.prompt:
            self.add(
                PROMPTS, name, f"{label} is scored for prompt {action.prompt}, not {record.prompt}"
            )
        if isinstance(event, ev.Tick) and action.attempt > sample.asked >= 0:
            sample.unscored(TOO_LATE, self.books.params.attempts_max)
        # After a resume what is still open is asked for again.
        attempt_min = sample.asked + (not isinstance(event, ev.Resumed))
        if sample.asked < 0:
            if isinstance(event, ev.SampleFinished) and self.findings.finished == action.request:
                sample.num_tokens, sample.digest = event.num_tokens, event.digest
                sample.segments, sample.finish = event.segments, event.finish.value
                self._check_segments(name, label, record, event.segments)
            else:
                self.add(C2, name, f"{label} is to be scored and has not finished")
        elif action.attempt < attempt_min or sample.reward is not None:
            self.add(C2, name, f"{label} counts as finished or scored twice")
        sample.asked = action.attempt

    def _check_segments(
        self, name: str, label: str, record: GroupRecord, segments: tuple[Segment, ...]
    ) -> None:
        versions = [segment.version for segment in segments]
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
        sample = self.books.sample(event.request)
        if sample is None or sample.reward is not None or not 0 <= event.attempt <= sample.asked:
            return  # A late answer to an earlier attempt counts: it is about the same tokens.
        if math.isfinite(event.reward):
            sample.reward = event.reward
        else:
            sample.unscored(f"reward is {event.reward}", self.books.params.attempts_max)

    def on_score_failed(self, event: ev.ScoreFailed) -> None:
        sample = self.books.sample(event.request)
        if sample is not None and sample.asked == event.attempt and sample.reward is None:
            sample.unscored(event.reason, self.books.params.attempts_max)

    def on_recomputed(self, event: ev.Recomputed) -> None:
        """Another path has computed the sample again under the version that the log names."""
        name, figures = f"group {event.request.group}", self.books.figures
        figures.num_recomputed += 1
        figures.recomputed_gap_max = max(figures.recomputed_gap_max, event.gap_max)
        sample = self.books.sample(event.request)
        # What the engine's own segments name; that they may is checked where it finished.
        self.check(
            sample is None or [s.version for s in sample.segments] == [event.version],
            C1,
            name,
            f"computed again under version {event.version}",
        )
        self.check(
            event.is_same,
            C1,
            name,
            f"sample {event.request.sample} is not what version {event.version} gives: log-probs "
            f"{event.gap_mean:.2g} apart on average, {event.gap_max:.2g} at most, "
            f"tolerance {event.tolerance:g}",
        )

    def on_continued(self, event: ev.Continued) -> None:
        sample = self.books.sample(event.request)
        if sample is not None and event.num_tokens > sample.journaled:
            sample.journaled, sample.num_alone = event.num_tokens, 0

    def on_wait_for(self, action: act.WaitFor) -> None:
        for group in action.groups:
            record = self.books.live.get(group)
            self.check(
                record is not None and record.step is None,
                C3,
                f"group {group}",
                "waited for, and it is not outstanding",
            )

    def on_hold_back(self, action: act.HoldBack) -> None:
        """Nobody is held back while the step in training lacks a group."""
        books = self.books
        needed = books.force(books.committed).batch_groups
        taken = sum(record.step == books.committed for record in books.live.values())
        untaken = sum(record.step is None for record in books.live.values())
        self.check(
            taken + untaken >= needed or not untaken,
            C3,
            f"step {action.step}",
            f"groups are held back, and {taken + untaken} are there for a batch of {needed}",
        )

    # -- the end of a group -----------------------------------------------------------------------

    def on_end(self, action: act.EndGroup) -> None:
        books = self.books
        name = f"group {action.group}"
        if (record := books.live.pop(action.group, None)) is None:
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
        books.unended[record.version] -= 1
        books.untaken[record.version] -= record.step is None
        if action.end is act.End.FAILED:
            losses = max((sample.num_alone for sample in record.samples), default=0)
            self.failed.setdefault(record.prompt, []).append((action.group, losses))
        elif action.end is not act.End.LOST:  # its prompt comes again, with what it has against it
            self.failed.pop(record.prompt, None)
        if action.end is act.End.TRAINED:
            self._check_trained(name, record, action)
        else:
            self._check_untrained(name, record, action)
        books.dirty = True

    def _check_trained(self, name: str, record: GroupRecord, action: act.EndGroup) -> None:
        books, figures = self.books, self.books.figures
        if (step := books.expected.pop(action.group, None)) is None or step != action.step:
            self.add(BATCH, name, f"trained in step {action.step}, not in its batch")
            return
        staleness, limit = step - record.version, books.force(step).max_staleness
        self.check(
            0 <= staleness <= limit,
            C3,
            name,
            f"trained at staleness {staleness}, {limit} is allowed",
        )
        self.check(
            not books.params.filter_equal or len(record.rewards()) != 1,
            C2,
            name,
            "trained with equal rewards, which are to be filtered",
        )
        self.keep(action.group, step, record)
        trained = [sample for s, sample in enumerate(record.samples) if s in record.fed]
        books.staleness[staleness] += 1
        books.staleness_sum += staleness * len(trained)
        books.num_mixed += sum(len(sample.segments) > 1 for sample in trained)
        figures.samples_trained += len(trained)
        figures.samples_masked += len(record.samples) - len(trained)
        tokens = sum(sample.num_tokens for sample in trained)
        figures.tokens_trained += tokens
        # A sample that failed is left out; what it had generated is discarded.
        figures.discarded_tokens += sum(sample.num_tokens for sample in record.samples) - tokens

    def keep_committed(self, batches: Mapping[StepIndex, tuple[GroupId, ...]]) -> None:
        """Of a run that stopped between a step's commit and its version's way to the disk: the
        files of the run tell of these steps, and their groups have not ended."""
        for step, groups in batches.items():
            for group in groups:
                if (record := self.books.live.get(group)) is not None:
                    self.keep(group, step, record)

    def keep(self, group: GroupId, step: StepIndex, record: GroupRecord) -> None:
        """For a comparison with the files of the run, if one was asked for."""
        trained = self.books.trained
        for place, s in enumerate(record.samples):
            if trained is not None and place in record.fed:
                facts = (s.num_tokens, s.reward, s.digest, s.segments, s.finish)
                trained[RequestId(group, place)] = TrainedSample(
                    step, record.version, record.prompt, *facts
                )

    def _check_untrained(self, name: str, record: GroupRecord, action: act.EndGroup) -> None:
        books = self.books
        self.check(
            record.step is None, C2, name, f"fed to step {record.step}, then ended as {action.end}"
        )
        self.check(action.step is None, C2, name, f"ended as {action.end} by step {action.step}")
        self.check(
            action.end is not act.End.SURPLUS or books.params.mode is Mode.REPLICATION,
            C2,
            name,
            "dropped as surplus, which only replication may do",
        )
        if action.end is act.End.FILTERED:
            settled = all(s.reward is not None or gave_up(s, books) for s in record.samples)
            self.check(
                books.params.filter_equal and len(record.rewards()) == 1 and settled,
                C2,
                name,
                "filtered by a rule that does not apply to it",
            )
        else:
            books.figures.discarded_tokens += sum(s.num_tokens for s in record.samples)
        if action.end is act.End.LOST:
            self._check_lost(name, record)
        self.check(action.reason, C2, name, f"ended as {action.end} without a reason")
        if action.reason and action.end is act.End.FAILED:
            self._check_failed(name, record, action)

    def _check_lost(self, name: str, record: GroupRecord) -> None:
        """Only with a version that was lost with its host. Where K or B has changed, also for want
        of a place; the `partial` baseline moves a group to newer versions."""
        event, books = self.findings.event, self.books
        self.owed[record.prompt] = None
        changed = len({(f.max_staleness, f.batch_groups) for f in books.in_force}) > 1
        may = changed or books.params.mode is Mode.PARTIAL
        self.check(
            isinstance(event, ev.Rewound) and (may or record.version > event.version),
            C2,
            name,
            f"ended as lost, its version {record.version} is not",
        )

    def _check_failed(self, name: str, record: GroupRecord, action: act.EndGroup) -> None:
        """Only what the events say can fail a group, and with their words."""
        books, params = self.books, self.books.params
        self.owed[record.prompt] = None
        failed = [s for s in record.samples if gave_up(s, books)]
        if len(failed) <= len(record.samples) - params.samples_needed:
            text = f"ended as failed ({action.reason}), and {len(failed)} of its samples have"
            # One sample that ends its instance, with nothing else running there, ends its group.
            failed = [s for s in record.samples if s.num_alone >= params.attempts_max]
            if not self.check(failed and params.losses_max, C2, name, text):
                return
        causes = [cause for s in failed for cause in s.causes]
        causes += [TOO_LATE] if isinstance(self.findings.event, ev.Tick) else []
        self.check(
            any(cause in action.reason for cause in causes),
            C2,
            name,
            f"failed because {action.reason!r}, which no event says; they say {causes[:3]}",
        )

    def on_set_aside(self, action: act.SetAside) -> None:
        params, prompt = self.books.params, action.prompt
        name, failed = f"prompt {prompt}", self.failed.pop(prompt, [])
        group, losses = failed[-1] if failed else (None, 0)
        for holds, message in (
            (
                group == action.group,
                f"set aside for group {action.group}, which did not fail last",
            ),
            (prompt not in self.set_aside, "set aside twice"),
            (
                len(failed) == action.failures,
                f"{len(failed)} of its groups failed, not {action.failures}",
            ),
            (
                not action.kills or losses >= params.attempts_max,
                f"set aside after {losses} lost instances that it had alone"
                f", {params.attempts_max} are needed",
            ),
            (
                action.kills or 0 < params.group_failures_max <= len(failed),
                f"set aside after {len(failed)} failed groups, {params.group_failures_max} are "
                "needed",
            ),
            (action.reason, "set aside without a reason"),
        ):
            self.check(holds, C2, name, message)
        self.set_aside[prompt] = action.reason
