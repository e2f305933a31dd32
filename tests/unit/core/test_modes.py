"""The five paradigms as the user sees them: what is admitted when, and what each gives up."""

from __future__ import annotations

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Params, policy_of
from dora_rl.types import Mode, Segment, UserError
from tests.kit.hand_driven import Hand, only


def staleness_of(hand: Hand) -> list[int]:
    ends = [a for e in hand.entries for a in only(e.actions, act.EndGroup)]
    return [a.step - a.version for a in ends if a.end is act.End.TRAINED]


@pytest.mark.parametrize(
    ("mode", "staleness", "cap"),
    [
        (Mode.SYNC, 0, 8),
        (Mode.ONE_STEP_OFF, 1, 8),
        (Mode.REPLICATION, 0, 10),
        (Mode.PARTIAL, 3, None),
        (Mode.MULTI_VERSION, 3, None),
    ],
)
def test_each_mode_is_a_small_policy(mode: Mode, staleness: int, cap: int | None) -> None:
    policy = policy_of(Params(mode=mode, batch_groups=8, max_staleness=3, oversample=1.25))
    assert (policy.max_staleness, policy.cap) == (staleness, cap)
    assert policy.streaming == (mode is Mode.MULTI_VERSION)
    assert policy.surplus_at_close == (mode is Mode.REPLICATION)
    assert policy.reversion_at_publish == (mode is Mode.PARTIAL)


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_trains_every_step_and_passes_the_audit(mode: Mode) -> None:
    hand = Hand(mode=mode, batch_groups=4, group_size=2, num_steps=5, max_staleness=2)
    hand.begin({"a": 8, "b": 8, "c": 8})
    hand.to_the_end()
    hand.audit()
    limit = {Mode.SYNC: 0, Mode.ONE_STEP_OFF: 1, Mode.REPLICATION: 0}.get(mode, 2)
    assert len(staleness_of(hand)) == 20 and max(staleness_of(hand)) <= limit


def test_sync_issues_one_batch_and_nothing_while_it_trains() -> None:
    hand = Hand(mode=Mode.SYNC, batch_groups=3, group_size=1, num_steps=2)
    hand.begin({"a": 64})
    assert sorted(hand.state.groups) == [0, 1, 2]
    closing = [a for g in (2, 0, 1) for a in hand.complete(g)]
    assert len(only(closing, act.Feed)) == 3 and len(only(closing, act.CloseStep)) == 1
    assert not only(hand.tell(ev.BatchAccepted(0)), act.IssueGroup)
    issued = only(hand.tell(ev.StepCommitted(0, "x")), act.IssueGroup)
    assert [a.version for a in issued] == [1, 1, 1]


def test_one_step_off_generates_the_next_batch_while_one_trains() -> None:
    hand = Hand(mode=Mode.ONE_STEP_OFF, batch_groups=3, group_size=1, num_steps=3)
    hand.begin({"a": 64})
    for group in range(3):
        hand.complete(group)
    issued = only(hand.tell(ev.BatchAccepted(0)), act.IssueGroup)
    assert [a.version for a in issued] == [0, 0, 0]


def test_multi_version_feeds_a_group_as_soon_as_it_is_ready() -> None:
    hand = Hand(batch_groups=3, group_size=1, num_steps=3)
    hand.begin({"a": 64})
    fed = only(hand.complete(1), act.Feed)
    assert [(f.step, f.group) for f in fed] == [(0, 1)]


def test_without_streaming_the_batch_is_fed_when_it_is_full() -> None:
    hand = Hand(batch_groups=3, group_size=1, num_steps=3, streaming=False)
    hand.begin({"a": 64})
    assert not only(hand.complete(1), act.Feed)
    hand.complete(0)
    assert len(only(hand.complete(2), act.Feed)) == 3


def test_groups_of_the_next_step_are_fed_while_the_step_before_trains() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=3)
    hand.begin({"a": 64})
    hand.complete(0)
    assert only(hand.complete(1), act.CloseStep)
    assert not only(hand.complete(2), act.Feed), "the learner may not hold step 0 yet"
    fed = only(hand.tell(ev.BatchAccepted(0)), act.Feed)
    assert [(f.step, f.group) for f in fed] == [(1, 2)]
    actions = hand.complete(3)
    assert [(f.step, f.group) for f in only(actions, act.Feed)] == [(1, 3)]
    assert not only(actions, act.CloseStep), "sealed versions are never two ahead of the log"
    actions = hand.tell(ev.StepCommitted(0, "x"))
    assert only(actions, act.CloseStep) == [act.CloseStep(1, (2, 3))]
    assert not [f for f in only(actions, act.Feed) if f.step == 1], "fed once"
    hand.to_the_end()
    hand.audit()


def test_without_streaming_the_next_batch_is_fed_ahead_when_it_is_full() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=3, streaming=False)
    hand.begin({"a": 64})
    hand.complete(0)
    hand.complete(1)
    hand.tell(ev.BatchAccepted(0))
    assert not only(hand.complete(2), act.Feed)
    assert [(f.step, f.group) for f in only(hand.complete(3), act.Feed)] == [(1, 2), (1, 3)]
    hand.to_the_end()
    hand.audit()


def test_updates_of_a_step_get_equal_shares() -> None:
    hand = Hand(batch_groups=6, updates_per_step=3, group_size=1, num_steps=1)
    hand.begin({"a": 64})
    fed = [f for g in range(6) for f in only(hand.complete(g), act.Feed)]
    assert [f.update for f in fed] == [0, 0, 1, 1, 2, 2]


def test_replication_ends_the_slow_rest_as_surplus() -> None:
    hand = Hand(mode=Mode.REPLICATION, batch_groups=2, oversample=2.0, group_size=2, num_steps=1)
    hand.begin({"a": 64})
    hand.complete(3)
    ended = only(hand.complete(1), act.EndGroup)
    assert [(e.group, e.end) for e in ended] == [(0, act.End.SURPLUS), (2, act.End.SURPLUS)]
    assert not hand.state.instances["a"].requests  # their requests were aborted
    hand.train()
    hand.audit()


def test_partial_continues_running_requests_on_the_new_version() -> None:
    hand = Hand(mode=Mode.PARTIAL, batch_groups=1, group_size=1, num_steps=3, max_staleness=2)
    hand.begin({"a": 8}, resident_max=2)
    slow = 1
    hand.complete(0)
    hand.train()
    again = hand.load_all()
    assert {a.version for a in only(again, act.Reversion)} == {1}
    assert hand.request(slow).version == 1 and hand.state.groups[slow].version == 0
    hand.finish(slow, segments=(Segment(0, 0), Segment(5, 1)))
    hand.score(slow)
    hand.to_the_end()
    hand.audit()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_groups", 0),
        ("group_size", 0),
        ("num_steps", 0),
        ("inflight_groups", 0),
        ("ready_max", 0),
        ("max_staleness", -1),
        ("updates_per_step", 3),
        ("samples_min", 5),
        ("oversample", 0.5),
        ("kv_low", 0.99),
    ],
)
def test_numbers_no_run_can_keep_its_promises_with_are_refused(field: str, value: float) -> None:
    with pytest.raises(UserError, match=field.split("_")[0]):
        Hand(**{field: value})


def test_partial_moves_no_request_even_when_levelling_is_on() -> None:
    hand = Hand(
        mode=Mode.PARTIAL,
        batch_groups=4,
        group_size=1,
        num_steps=3,
        max_staleness=2,
        inflight_groups=4,
        level_running=True,
        level_slack=0.0,
    )
    hand.begin({"a": 4})
    hand.join("b", 4)
    assert not only(hand.load_all(), act.Move)
