"""The staleness bound from both sides: what it allows always works, what it refuses never would.

Two oracles that know nothing of the invariant: a scheduler that deals places to groups by earliest
deadline, and an exhaustive walk through every order in which a small run can unfold.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dora_rl.core.window import Bound, Untaken


def feasible(bound: Bound, untaken: Untaken) -> bool:
    """Can every group still be trained in time? Deals the places out by earliest deadline."""
    deadlines = sorted(
        min(version + bound.max_staleness, bound.last)
        for version, count in untaken
        for _ in range(count)
    )
    steps = [bound.filling] * bound.free
    for step in range(bound.filling + 1, bound.last + 1):
        steps += [step] * bound.batch
    return len(deadlines) <= len(steps) and all(
        step <= deadline for step, deadline in zip(steps, deadlines, strict=False)
    )


@st.composite
def moments(draw: st.DrawFn) -> tuple[Bound, list[tuple[int, int]]]:
    """Some moment of a run: a step in filling, its free places, groups on the live versions."""
    staleness, batch = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    filling = draw(st.integers(0, 8))
    last = filling + draw(st.integers(0, 5))
    bound = Bound(filling, draw(st.integers(0, batch)), staleness, batch, last)
    versions = range(max(0, bound.oldest), filling + 1)
    return bound, [(version, draw(st.integers(0, 6))) for version in versions]


@st.composite
def sound_moments(draw: st.DrawFn) -> tuple[Bound, list[tuple[int, int]]]:
    """A moment at which everything can still be trained in time."""
    bound, untaken = draw(moments())
    versions = [version for version, count in untaken for _ in range(count)]
    kept = [(version, 0) for version, _ in untaken]
    for version in draw(st.permutations(versions)):
        if feasible(bound, with_one_more(kept, version)):
            kept = with_one_more(kept, version)
    return bound, kept


def with_one_more(untaken: Untaken, version: int, change: int = 1) -> list[tuple[int, int]]:
    return [(v, n + change * (v == version)) for v, n in untaken]


@given(moments())
def test_the_invariant_is_exactly_that_everything_can_be_trained_in_time(
    moment: tuple[Bound, list[tuple[int, int]]],
) -> None:
    bound, untaken = moment
    assert bound.holds(untaken) == feasible(bound, untaken)


@given(sound_moments(), st.data())
def test_admission_is_refused_only_when_a_deadline_would_be_missed(
    moment: tuple[Bound, list[tuple[int, int]]], data: st.DataObject
) -> None:
    bound, untaken = moment
    version = data.draw(st.sampled_from([v for v, _ in untaken]))
    assert bound.may_admit(untaken, version) == feasible(bound, with_one_more(untaken, version))


@given(sound_moments(), st.data())
def test_taking_is_refused_only_when_an_older_group_would_miss_its_deadline(
    moment: tuple[Bound, list[tuple[int, int]]], data: st.DataObject
) -> None:
    bound, untaken = moment
    present = [v for v, n in untaken if n]
    assume(present)
    version = data.draw(st.sampled_from(present))
    after = Bound(bound.filling, bound.free - 1, bound.max_staleness, bound.batch, bound.last)
    may = bound.free > 0 and feasible(after, with_one_more(untaken, version, -1))
    assert bound.may_take(untaken, version) == may


@given(moments())
def test_a_version_too_old_for_the_step_is_never_admitted(
    moment: tuple[Bound, list[tuple[int, int]]],
) -> None:
    bound, untaken = moment
    assert not bound.may_admit(untaken, bound.oldest - 1)
    assert not bound.holds([(bound.oldest - 1, 1)])


def test_reserving_for_due_groups_only_is_not_enough() -> None:
    """Four slow groups of version 1 run, K = 2, B = 2; two fast new groups of version 2 are ready.

    Nothing is due in step 2, so a rule that looks at due groups only takes both new ones. Then
    step 3 has four due groups for two places.
    """
    bound = Bound(filling=2, free=2, max_staleness=2, batch=2, last=9)
    untaken = [(1, 4), (2, 2)]
    due_in_this_step = [n for v, n in untaken if v + bound.max_staleness <= bound.filling]
    assert not due_in_this_step and feasible(bound, untaken)
    next_step = Bound(filling=3, free=2, max_staleness=2, batch=2, last=9)
    assert not feasible(next_step, [(1, 4), (2, 0)])
    assert not bound.may_take(untaken, 2)
    assert bound.may_take(untaken, 1)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_k_0_is_synchronous_and_k_1_allows_one_batch_while_a_step_trains(batch: int) -> None:
    def admitted(bound: Bound, version: int) -> int:
        count = 0
        while bound.may_admit([(version, count)], version):
            count += 1
        return count

    # Step 4 is being filled by version 4: exactly its batch, for K = 0.
    assert admitted(Bound(4, batch, 0, batch, 9), 4) == batch
    # Step 4 trains, step 5 is being filled, version 4 is still the newest.
    assert admitted(Bound(5, batch, 0, batch, 9), 4) == 0
    assert admitted(Bound(5, batch, 1, batch, 9), 4) == batch


def test_the_last_step_takes_in_only_what_it_can_train() -> None:
    bound = Bound(filling=9, free=3, max_staleness=4, batch=8, last=9)
    assert bound.capacity(9) == 3
    assert bound.may_admit([(9, 2)], 9) and not bound.may_admit([(9, 3)], 9)


class Moment(NamedTuple):
    """Groups that run and groups that are ready, counted per version from 0 on."""

    filling: int
    free: int
    running: tuple[int, ...]
    ready: tuple[int, ...]


class Walk:
    """Every way a small run can unfold: admissions, completions, failures and takes in any order.

    Versions appear as late as the step before or as early as the step being filled, whichever the
    walk chooses, since admission may use any version that exists.
    """

    def __init__(self, staleness: int, batch: int, last: int) -> None:
        self.staleness, self.batch, self.last = staleness, batch, last
        self.seen: set[Moment] = set()
        self.num_finished = 0

    def bound(self, now: Moment) -> Bound:
        return Bound(now.filling, now.free, self.staleness, self.batch, self.last)

    def untaken(self, now: Moment) -> list[tuple[int, int]]:
        both = zip(now.running, now.ready, strict=True)
        return [(version, a + b) for version, (a, b) in enumerate(both)]

    def go(self) -> None:
        empty = (0,) * (self.last + 1)
        todo = [Moment(0, self.batch, empty, empty)]
        while todo:
            now = todo.pop()
            if now not in self.seen:
                self.seen.add(now)
                todo.extend(self.check(now))

    def check(self, now: Moment) -> list[Moment]:
        if now.filling > self.last:
            assert not any(now.running) and not any(now.ready), f"left over at the end: {now}"
            self.num_finished += 1
            return []
        bound, untaken = self.bound(now), self.untaken(now)
        assert feasible(bound, untaken), f"a deadline will be missed: {now}"
        takes = [v for v, n in enumerate(now.ready) if n and bound.may_take(untaken, v)]
        admits = [v for v in range(now.filling + 1) if bound.may_admit(untaken, v)]
        if any(now.ready) and not takes:
            oldest = min(v for v, n in enumerate(now.ready) if n)
            assert any(now.running[:oldest]), f"a take waits for nobody: {now}"
        if not any(now.running) and not any(now.ready):
            assert now.filling in admits, f"nothing runs and nothing may start: {now}"
        return [*self.moves(now, takes, admits)]

    def moves(self, now: Moment, takes: list[int], admits: list[int]) -> list[Moment]:
        after: list[Moment] = []
        for version in takes:
            taken = now._replace(ready=_change(now.ready, version, -1), free=now.free - 1)
            if not taken.free:
                taken = taken._replace(filling=now.filling + 1, free=self.batch)
            after.append(taken)
        for version in admits:
            after.append(now._replace(running=_change(now.running, version, 1)))
        for version, count in enumerate(now.running):
            if count:
                fewer = _change(now.running, version, -1)
                after.append(now._replace(running=fewer))  # filtered or failed
                after.append(now._replace(running=fewer, ready=_change(now.ready, version, 1)))
        return after


def _change(counts: tuple[int, ...], version: int, by: int) -> tuple[int, ...]:
    return tuple(n + by * (v == version) for v, n in enumerate(counts))


@pytest.mark.parametrize(
    ("staleness", "batch", "last"),
    [(0, 1, 3), (0, 3, 3), (1, 1, 4), (1, 3, 4), (2, 1, 4), (2, 3, 4), (3, 2, 5), (4, 1, 6)],
)
def test_no_order_of_events_misses_a_deadline_or_leaves_anything_over(
    staleness: int, batch: int, last: int
) -> None:
    walk = Walk(staleness, batch, last)
    walk.go()
    assert walk.num_finished == 1  # one end only: all steps trained, nothing outstanding


@settings(max_examples=200)
@given(moments())
def test_capacity_grows_by_one_batch_per_version_until_the_last_step(
    moment: tuple[Bound, list[tuple[int, int]]],
) -> None:
    bound, _ = moment
    for version in range(max(0, bound.oldest), bound.filling):
        more = bound.capacity(version + 1) - bound.capacity(version)
        assert more == (bound.batch if version + bound.max_staleness < bound.last else 0)
