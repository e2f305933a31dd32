"""How far ahead of the learner groups are issued: the smallest staleness at which it does not wait.

The bound (`window`) says what must not happen; this says what is worth doing under it. A group that
is issued long before its step only ages, so of the groups that are issued and not committed there
are at most B for the step in training and `ahead` more. With a steady flow the mean staleness is
`ahead` / B. Whom this holds back is issued when the next version is there, and is fresher by it.

    lead   the least time by which a group was taken before the learner came to it, over one step.
           So much later all could have been issued. Below zero: the learner waited.
    spare  the share of the instances' rate that lay idle in the step.

    the learner waited:     ahead rises to what would have been enough; but not above one batch
                            while the instances are busy: then a start earlier is only a longer
                            queue
    otherwise:              ahead falls by half of what the lead is above what it varies by, and not
                            below what was too little a while ago

A change of `ahead` shows in the lead one step later, so that each is compared with the allowance
under which its groups were issued.

No promise depends on this. Whatever the numbers here are, the step in training gets its B groups
(`may_issue`), the bound is checked as well, and whoever is held back waits for the end of a step
that has all its groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dora_rl.types import StepIndex, Version

GAIN = 0.5
MARGIN = 1.5  # of the lead, in mean variations
MEMORY = 0.125  # of the mean variation
WAIT_SHARE = 0.02  # of a step: less is no waiting
RAISE_MAX = 0.5  # of a batch, after one step
LOWER = 0.125  # of a batch, after a step that waited for busy instances
SPARE = 0.125  # of a batch, above what was too little
FORGET = 1 / 64  # of what was too little, with each step
ANSWERS = 2.0  # what is ahead of a publication lasts for so long as it takes
BUSY = 0.5  # instances of which less lies idle
FADING = 1 / 512  # of a report, with each later one
REPORTS_MIN = 8
ROUNDING = 1e-6


@dataclass(slots=True)
class Instances:
    """What their reports say of how much more they would do with more requests. A decode step of n
    requests takes about a + b * n: of 1 / b tokens a second the share a / (a + b * n) lies idle.
    a and b are those of the straight line through (1 / n, time / n). Older reports fade."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    idle_s: float = 0.0  # of this step, of the ones before half and half again; at the full rate
    seen_s: float = 0.0

    def see(self, num_running: int, num_steps: int, elapsed_s: float) -> None:
        """One report: so many decode steps since the last one."""
        if elapsed_s <= 0 or num_steps < 0:
            return
        self.seen_s += elapsed_s
        if num_running <= 0:
            self.idle_s += elapsed_s
            return
        self.idle_s += elapsed_s * self.idle_of(num_running)
        if num_steps:
            x, y = 1 / num_running, elapsed_s / num_steps / num_running
            values = (1.0, x, y, x * x, x * y)
            for name, value in zip(("weight", "x", "y", "xx", "xy"), values, strict=True):
                setattr(self, name, getattr(self, name) * (1 - FADING) + value)

    def idle_of(self, num_running: int) -> float:
        """0 while it is not known.

        >>> seen = Instances()
        >>> for num in range(1, 50):
        ...     seen.see(num, 100, 100 * (0.01 + 0.001 * num))
        >>> round(seen.idle_of(10), 3), round(seen.idle_of(90), 3)
        (0.5, 0.1)
        """
        if self.weight < REPORTS_MIN:
            return 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = self.xx / self.weight - mean_x * mean_x
        if variance <= ROUNDING * mean_x * mean_x:  # always as many: there is no line
            return 0.0
        fixed_s = (self.xy / self.weight - mean_x * mean_y) / variance
        each_s = mean_y - fixed_s * mean_x
        if fixed_s <= 0:
            return 0.0
        return fixed_s / (fixed_s + max(0.0, each_s) * num_running)

    @property
    def spare(self) -> float:
        """The share of what they could have done that lay idle lately."""
        return self.idle_s / self.seen_s if self.seen_s > 0 else 0.0


@dataclass(slots=True)
class Freshness:
    """Part of the core's state. `ahead` None: no step was measured yet, one batch is meant."""

    ahead: float | None = None
    pace_s: float = 0.0  # the learner's time for a step, divided by its groups; 0: not known
    group_s: float = 0.0  # the part of it that it can do while others are missing
    tail_s: float = 0.0  # from the last group of a step to its end
    lead: float = 0.0  # of the last step that was measured, in groups
    was: float | None = None  # `ahead` in the step before, which this one's groups were issued in
    expected: float | None = None  # what the next lead should be
    varies: float = 0.0  # by how much it is not
    floor_s: float = 0.0  # training time of the groups ahead that were too few; fades
    answer_s: float = (
        0.0  # from a publication to the first group of the version; the longest lately
    )
    answered: Version = -1  # the last version of which there was one
    spare: float = 0.0  # of the instances, in the last step
    instances: Instances = field(default_factory=Instances)
    began_s: float | None = None  # when the step in training began; None: something came between
    held_since_s: float | None = None
    held_s: float = 0.0  # for so long admission was held back in this step
    told_step: StepIndex = -1  # the last in which it was

    def figures(self, now: float, batch: int) -> dict[str, float]:
        """For metrics.jsonl, before the step's end is told."""
        since_s = now if self.held_since_s is None else self.held_since_s
        return {
            "freshness/ahead": float(batch) if self.ahead is None else self.ahead,
            "freshness/lead": self.lead,
            "freshness/spare": self.instances.spare,
            "time/held_back": self.held_s + max(0.0, now - since_s),
        }


class Filled(Protocol):
    """Of a batch, what its takes have left: see `note_take`. The moments are None where they were
    of another clock."""

    size: int
    need_s: float | None
    closed_s: float | None


def allowance(freshness: Freshness, batch: int, max_staleness: int) -> int:
    """How many groups beyond the step in training may be there, whatever the state is.

    >>> allowance(Freshness(), 8, 2), allowance(Freshness(ahead=3.9), 8, 2)
    (8, 3)
    >>> [allowance(Freshness(ahead=wild), 8, 2) for wild in (-5.0, 1e300, float("nan"))]
    [0, 16, 0]
    """
    most = max_staleness * batch
    ahead = float(batch) if freshness.ahead is None else freshness.ahead
    return int(min(max(0.0, ahead), most))


def may_issue(outstanding: int, batch: int, ahead: int) -> bool:
    """Is there less than the step in training and what is ahead of it?

    >>> [may_issue(outstanding, 8, 3) for outstanding in (0, 10, 11)]
    [True, True, False]
    """
    return outstanding < batch + ahead


def hold(freshness: Freshness, now: float, step: StepIndex) -> bool:
    """Admission is held back from now on. True: it was not yet in this step."""
    if freshness.held_since_s is None:
        freshness.held_since_s = now
    is_news, freshness.told_step = freshness.told_step != step, step
    return is_news


def note_report(freshness: Freshness, num_running: int, num_steps: int, elapsed_s: float) -> None:
    freshness.instances.see(num_running, num_steps, elapsed_s)


def note_first(freshness: Freshness, version: Version, now: float) -> None:
    """A group of the newest version is ready, perhaps its first."""
    if freshness.answered != version and freshness.began_s is not None:
        freshness.answered = version
        freshness.answer_s = max(now - freshness.began_s, freshness.answer_s * (1 - MEMORY))


def release(freshness: Freshness, now: float) -> None:
    """It is not held back any more."""
    if freshness.held_since_s is not None:
        freshness.held_s += max(0.0, now - freshness.held_since_s)
        freshness.held_since_s = None


def disturb(freshness: Freshness) -> None:
    """A worker or the controller was lost: the time of this step says nothing."""
    freshness.began_s = None


def another_clock(freshness: Freshness) -> None:
    """The controller began anew: no moment that is noted here means anything now."""
    disturb(freshness)
    freshness.held_since_s, freshness.held_s = None, 0.0


def on_step(
    freshness: Freshness, step: Filled, now: float, waited_s: float, max_staleness: int
) -> None:
    """The learner has ended a step, and was without work for `waited_s` of it (below zero: that is
    not known): go closer to what it needs."""
    release(freshness, now)
    freshness.held_s = 0.0
    freshness.spare = freshness.instances.spare
    freshness.instances.idle_s /= 2
    freshness.instances.seen_s /= 2
    began_s, freshness.began_s = freshness.began_s, now
    if began_s is None or step.need_s is None or step.closed_s is None:
        return
    took_s = now - began_s
    worked_s = took_s - waited_s
    if waited_s < 0 or worked_s <= 0:
        return
    starved = waited_s > WAIT_SHARE * took_s
    if starved:  # all but the last group was trained when the batch was full
        freshness.tail_s = now - max(began_s, step.closed_s)
    freshness.group_s = max(0.0, worked_s - freshness.tail_s) / step.size
    knew_pace, freshness.pace_s = freshness.pace_s > 0, worked_s / step.size
    if not knew_pace:
        return
    lead_s = step.need_s + began_s
    lead = (min(lead_s, -waited_s) if starved else lead_s) / freshness.pace_s
    freshness.floor_s *= 1 - FORGET
    _note_lead(freshness, lead, step.size)
    _move(freshness, step.size, max_staleness * step.size)


def _behind_publication(freshness: Freshness, batch: int) -> float:
    """With less than a batch ahead a step needs groups of its own version. These are there some
    time after the publication, which what is ahead must be enough for."""
    if freshness.group_s <= 0:
        return float(batch)
    return min(float(batch), ANSWERS * freshness.answer_s / freshness.group_s)


def _note_lead(freshness: Freshness, lead: float, batch: int) -> None:
    """And by how much it is not what was expected."""
    freshness.lead = min(max(lead, -float(batch)), 2.0 * batch)
    if freshness.expected is not None:
        moved = min(abs(freshness.lead - freshness.expected), float(batch))
        freshness.varies += MEMORY * (moved - freshness.varies)


def _move(freshness: Freshness, batch: int, most: int) -> None:
    """Closer to what would have been right for the step that was measured. Its groups were issued
    under the allowance of the step before."""
    ahead = float(batch) if freshness.ahead is None else freshness.ahead
    was = ahead if freshness.was is None else freshness.was
    lead = freshness.lead
    if lead < 0:
        freshness.floor_s = max(freshness.floor_s, (was + SPARE * batch) * freshness.pace_s)
        goal = max(ahead, min(was - lead + 1, ahead + RAISE_MAX * batch))
        if freshness.spare < BUSY:  # to start earlier would only make the queue longer
            goal = min(goal, max(float(batch), ahead - LOWER * batch))
    else:
        right = was + 1 + MARGIN * freshness.varies - lead
        lowered = ahead + GAIN * min(0.0, right - ahead)
        enough = max(freshness.floor_s / freshness.pace_s, _behind_publication(freshness, batch))
        goal = max(lowered, min(ahead, enough))
    goal = min(max(0.0, goal), float(most))
    freshness.was, freshness.ahead, freshness.expected = ahead, goal, lead + ahead - was
