"""How far ahead groups are issued: what one step teaches, and that no state of it can do harm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.core import actions as act
from dora_rl.core import admission
from dora_rl.core import events as ev
from dora_rl.core.freshness import Freshness, Instances, allowance, disturb, on_step
from dora_rl.core.invariants import check_invariants
from dora_rl.core.params import Params
from dora_rl.core.state import Batch, Group, State
from dora_rl.observe.audit import audit
from dora_rl.sim.checkers import Checker
from dora_rl.sim.world import World
from dora_rl.types import Mode
from tests.kit.hand_driven import Hand
from tests.kit.simulated_logs import entries_of, small_world

B, K, STEP_S = 10, 2, 10.0


class Learner:
    """Steps of ten groups in ten seconds, one after the other, told to a controller."""

    def __init__(self, **state: Any) -> None:
        self.freshness = Freshness(**state)
        self.now = 0.0
        self.step(early_s=0.0)
        self.step(early_s=0.0)  # the first ones only teach the pace

    def step(self, *, early_s: float, waited_s: float = 0.0) -> float:
        """Every group of the step was there so much before the learner came to it."""
        began, self.now = self.now, self.now + STEP_S + waited_s
        closed = began + waited_s + STEP_S * (B - 1) / B - early_s
        batch = Batch(0, B, 1, need_s=-began + early_s - waited_s, closed_s=closed)
        on_step(self.freshness, batch, self.now, waited_s, K)
        return self.ahead

    @property
    def ahead(self) -> float:
        assert self.freshness.ahead is not None
        return self.freshness.ahead


def test_what_lies_ready_too_early_is_issued_later() -> None:
    learner = Learner(ahead=20.0)
    course = [learner.step(early_s=12.0) for _ in range(6)]
    assert course == sorted(course, reverse=True)
    assert course[0] > 10 and course[-1] < 3, "by and by"


def test_a_wait_raises_what_is_issued_ahead_at_once() -> None:
    learner = Learner(ahead=4.0)
    learner.freshness.instances.idle_s = learner.freshness.instances.seen_s = 100.0
    before = learner.ahead
    assert learner.step(early_s=0.0, waited_s=3.0) > before + 2
    learner.freshness.instances.idle_s = learner.freshness.instances.seen_s = 1e9
    for _ in range(8):
        learner.step(early_s=0.0, waited_s=STEP_S)
    assert learner.ahead == K * B, "and never beyond the bound"


def test_a_wait_for_busy_instances_goes_to_one_batch_and_no_further() -> None:
    low, high = Learner(ahead=2.0), Learner(ahead=18.0)
    for _ in range(12):
        low.step(early_s=0.0, waited_s=STEP_S)
        high.step(early_s=0.0, waited_s=STEP_S)
    assert low.ahead == high.ahead == B


def test_what_was_too_little_is_not_tried_again_at_once() -> None:
    learner = Learner(ahead=8.0)
    learner.freshness.instances.idle_s = learner.freshness.instances.seen_s = 1e9
    learner.step(early_s=0.0, waited_s=2.0)
    for _ in range(6):
        assert learner.step(early_s=8.0) > 8.0
    for _ in range(60):
        learner.step(early_s=8.0)
    assert learner.ahead < 8.0, "in time it is forgotten"


def test_steps_that_tell_nothing_change_nothing() -> None:
    learner = Learner(ahead=7.0)
    before = learner.ahead
    assert learner.step(early_s=0.0, waited_s=-1.0) == before, "an older learner does not tell"
    disturb(learner.freshness)
    assert learner.step(early_s=-8.0, waited_s=0.0) == before, "one that was interrupted"
    empty = Batch(0, B, 1)
    on_step(learner.freshness, empty, learner.now + 1.0, 0.5, K)
    assert learner.ahead == before, "one that was filled before a restart"


def test_instances_that_do_more_with_more_requests_have_something_to_spare() -> None:
    for fixed_s, each_s, least, most in ((0.03, 1e-5, 0.9, 1.0), (0.001, 0.001, 0.0, 0.1)):
        seen = Instances()
        for num in [*range(1, 40)] * 2:
            seen.see(num, 50, 50 * (fixed_s + each_s * num))
        assert least <= seen.idle_of(30) <= most
    assert Instances().idle_of(30) == 0.0, "nothing is known of them"
    idle = Instances()
    idle.see(0, 0, 5.0)
    assert idle.spare == 1.0


def test_what_is_held_back_is_said_once_a_version_and_issued_on_the_next() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=6, freshness=True)
    hand.begin({"a": 64})
    issued = [a for e in hand.entries for a in e.actions if isinstance(a, act.IssueGroup)]
    held = [a for e in hand.entries for a in e.actions if isinstance(a, act.HoldBack)]
    assert len(issued) == 4, "a batch in training and one ahead; the bound alone allows six"
    assert held == [act.HoldBack(0, 2, 0, 4, 0.0)]
    for group in (0, 1):
        hand.complete(group)
    more = [a for a in hand.train() if isinstance(a, act.IssueGroup)]
    assert [a.version for a in more] == [1, 1]
    hand.to_the_end()
    hand.audit()


@pytest.mark.parametrize("ahead", [0.0, -3.0, float("nan"), float("inf")])
def test_the_step_in_training_always_gets_its_groups(ahead: float) -> None:
    hand = Hand(batch_groups=3, group_size=1, num_steps=5, freshness=True)
    hand.state.freshness.ahead = ahead
    hand.begin({"a": 64})
    for _ in range(200):
        hand.state.freshness.ahead = ahead
        if hand.state.stopped:
            break
        hand.settle()
        for group in hand.running():
            hand.complete(group.id)
        if hand.state.batches[hand.state.committed].close_sent:
            hand.train()
    assert hand.state.stopped == "all steps are trained"
    check_invariants(hand.state)


WILD = st.one_of(
    st.none(),
    st.floats(-1e3, 1e3),
    st.sampled_from([0.0, -1.0, 1e300, float("inf"), float("-inf"), float("nan")]),
)


def disturbed(world: World, draws: list[float | None]) -> None:
    """Before each event another state of the controller, from the list, round and round."""
    names = (
        "ahead",
        "was",
        "expected",
        "began_s",
        "floor_s",
        "varies",
        "pace_s",
        "group_s",
        "lead",
    )
    turn = [0]

    def see(event: Any, actions: Any) -> None:
        assert world.loop is not None
        freshness = world.loop.state.freshness
        for name in names:
            value = draws[turn[0] % len(draws)]
            turn[0] += 1
            is_optional = name in ("ahead", "was", "expected", "began_s")
            setattr(freshness, name, value if is_optional else value or 0.0)

    world.watchers.append(see)


@settings(max_examples=25, deadline=None)
@given(draws=st.lists(WILD, min_size=1, max_size=23), seed=st.integers(0, 50))
def test_every_promise_holds_under_any_state(draws: list[float | None], seed: int) -> None:
    world = small_world(Mode.MULTI_VERSION, seed, freshness=True)
    log: Any = world.log
    checker = Checker(world, log, every=5)
    disturbed(world, draws)
    world.start()
    assert world.run(1e6), "the run comes to its end"
    checker.finish()
    report = audit(entries_of(world))
    assert report.ok, [str(finding) for finding in report.findings]


def test_without_its_floor_a_run_would_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(
        admission, "may_issue", lambda outstanding, batch, ahead: outstanding < ahead
    )
    world = small_world(Mode.MULTI_VERSION, 1, freshness=True)
    disturbed(world, [0.0])
    world.start()
    assert not world.run(2e4)


def test_off_is_as_it_was() -> None:
    """Nothing is measured, said or held back: logs of older releases replay."""
    hand = Hand(batch_groups=2, group_size=1, num_steps=4)
    assert not Params().freshness
    hand.begin({"a": 64})
    while hand.state.stopped is None:
        hand.settle()
        for group in hand.running():
            hand.complete(group.id)
        if hand.state.batches[hand.state.committed].close_sent:
            hand.train()
    assert hand.state.freshness == State(hand.params).freshness
    assert not [a for e in hand.entries for a in e.actions if isinstance(a, act.HoldBack)]


def test_it_may_be_switched_on_and_off_in_a_resumed_run() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=12)
    hand.begin({"a": 64}, resident_max=4)
    assert hand.state.next_group == 6, "as many as the bound allows"
    for fresh, most in ((True, 2), (False, 4)):
        hand.tell(ev.Resumed(replace(hand.params, freshness=fresh)))
        hand.tell(ev.LearnerJoined(hand.state.committed, hand.state.committed, incarnation=0))
        hand.join("a", versions=tuple(hand.state.versions), resident_max=4)
        for _ in range(3):
            hand.settle()
            for group in hand.running():
                hand.complete(group.id)
            hand.train()
        assert len([g for g in hand.state.groups.values() if not is_committed(hand, g)]) == 2 + most
    hand.to_the_end()
    hand.audit()


def is_committed(hand: Hand, group: Group) -> bool:
    return group.step is not None and group.step < hand.state.committed


def test_the_allowance_is_one_batch_until_something_was_measured() -> None:
    assert allowance(Freshness(), B, K) == B
    assert allowance(Freshness(), B, 0) == 0


def test_instances_that_always_run_as_many_say_nothing() -> None:
    """A line through one point is rounding alone."""
    for running in (48, 100, 1000):
        seen = Instances()
        for _ in range(200):
            seen.see(running, 100, 100 * (0.01 + 0.001 * running))
        assert seen.idle_of(running) == seen.spare == 0.0


def resumed(hand: Hand, **changes: Any) -> None:
    hand.tell(ev.Resumed(replace(hand.params, **changes)))
    hand.tell(ev.LearnerJoined(hand.state.committed, hand.state.committed, incarnation=0))
    hand.join("a", 64, versions=tuple(hand.state.versions), resident_max=9)
    hand.settle()


def test_the_audit_knows_the_batch_of_the_step_in_training() -> None:
    """B grows in a resumed run: the step in training still has its own."""
    hand = Hand(batch_groups=2, group_size=1, num_steps=12, freshness=True)
    hand.begin({"a": 3}, resident_max=9)
    hand.state.freshness.ahead = 4.0
    hand.complete(0), hand.complete(1)
    resumed(hand, batch_groups=8)
    hand.tell(ev.BatchAccepted(0))
    assert any(isinstance(a, act.HoldBack) for e in hand.entries for a in e.actions)
    assert audit(hand.entries).findings == ()


def test_a_pause_between_stop_and_resume_was_not_held_back() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=12, freshness=True)
    hand.begin({"a": 64}, resident_max=4)
    assert hand.state.freshness.held_since_s is not None
    hand.now += 36_000.0
    resumed(hand)
    assert hand.state.freshness.figures(hand.now, 2)["time/held_back"] < 100.0
