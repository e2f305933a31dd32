"""How far ahead of the learner groups are issued: the smallest staleness at which it does not wait.

The bound (`window`) says what must not happen; this says what is worth doing under it. A group that
is issued long before its step only ages, so of the groups that are issued and not committed there
are at most B for the step in training and `ahead` more. With a steady flow the mean staleness is
`ahead` / B. What is held back is issued when the next version is published, and is fresher by it.

    lead    the least time by which a group was taken before the learner came to it, over one step.
            Below zero the learner stood still. So much later everything could have been issued.
    margin  what the lead should be: as much as it varies from step to step.

    the learner waited:  ahead += what it would have trained meanwhile
    otherwise:           ahead -= GAIN * (lead - margin)        both in groups

A change shows in the lead one step later, and moves it by as much: with a delay of one step a gain
of 1/4 goes to the goal as fast as is possible without swinging.

Nothing depends on this for its promises. Whatever the numbers here are, the step in training gets
its B groups (the floor), the bound is checked after them, and who is held back waits for a step
that has all its groups, so that its publication comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora_rl.types import StepIndex

GAIN = 0.25
MEMORY = 0.125  # of the mean variation of the lead
WAIT_SHARE = 0.02  # of a step: less is no waiting
RAISE_MAX = 0.5  # of a batch, after one step


@dataclass(slots=True)
class Freshness:
    """Part of the core's state. `ahead` None: no step was measured yet, one batch is meant."""

    ahead: float | None = None
    group_s: float = 0.0  # how long the learner trains on a group; 0: not known
    lead: float = 0.0  # of the last step that was measured, in groups
    varies: float = 0.0  # by how much the lead does, in groups
    began_s: float | None = None  # when the step in training began; None: something came between
    held_since_s: float | None = None
    held_s: float = 0.0  # for so long admission was held back in this step
    told_step: StepIndex = -1  # the last in which it was


@dataclass(frozen=True, slots=True)
class Measured:
    """One step of the learner, as its end tells. `need_s` is what the batch has noted of its takes:
    the least of (learner's time for the groups before it - moment of the take)."""

    batch: int
    now_s: float
    waited_s: float
    need_s: float | None
    blocked: bool  # groups lay ready that older ones had to go before


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


def release(freshness: Freshness, now: float) -> None:
    """It is not held back any more."""
    if freshness.held_since_s is not None:
        freshness.held_s += max(0.0, now - freshness.held_since_s)
        freshness.held_since_s = None


def disturb(freshness: Freshness) -> None:
    """A worker or the controller was lost: the time of this step says nothing."""
    freshness.began_s = None


def on_step(freshness: Freshness, step: Measured, max_staleness: int) -> None:
    """The learner has ended a step: go closer to what it needs."""
    release(freshness, step.now_s)
    freshness.held_s = 0.0
    began_s, freshness.began_s = freshness.began_s, step.now_s
    if began_s is None or step.need_s is None or step.waited_s < 0 or step.now_s <= began_s:
        return
    took_s = step.now_s - began_s
    waited_s = min(step.waited_s, took_s)
    knew_pace = freshness.group_s > 0
    freshness.group_s = (took_s - waited_s) / step.batch
    if not knew_pace or freshness.group_s <= 0:
        return
    lead = (step.need_s + began_s) / freshness.group_s
    if waited_s > WAIT_SHARE * took_s:
        lead = min(lead, -waited_s / freshness.group_s)
    _note_variation(freshness, lead, step.batch)
    change = _change(freshness, lead, step)
    ahead = float(step.batch) if freshness.ahead is None else freshness.ahead
    freshness.ahead = min(max(0.0, ahead + change), float(max_staleness * step.batch))


def _note_variation(freshness: Freshness, lead: float, batch: int) -> None:
    """A batch at most: one odd step must not count for many."""
    moved = min(abs(lead - freshness.lead), float(batch))
    freshness.varies += MEMORY * (moved - freshness.varies)
    freshness.lead = lead


def _change(freshness: Freshness, lead: float, step: Measured) -> float:
    """By how many groups to move."""
    if step.blocked and lead < 0:
        return 0.0  # more groups would not have helped
    if lead < 0:
        return min(-lead, RAISE_MAX * step.batch)
    margin = 1.0 + freshness.varies
    return GAIN * (margin - min(lead, float(2 * step.batch)))
