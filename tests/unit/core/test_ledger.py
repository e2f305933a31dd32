"""The life of groups and samples: late, repeated and broken messages, failures, filters, stops."""

from __future__ import annotations

import typing

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.state import Phase, State
from dora_rl.core.step import HANDLERS
from dora_rl.io.codec import encode
from dora_rl.types import Finish, RequestId, Segment
from tests.kit.hand_driven import Hand, only


@pytest.fixture
def hand() -> Hand:
    hand = Hand(batch_groups=4, group_size=2, num_steps=3, attempts_max=3)
    hand.begin({"a": 64})
    return hand


def ignored(hand: Hand, event: ev.Event) -> bool:
    """Nothing is done and nothing is remembered."""
    before = encode(State, hand.state)
    actions = hand.tell(event)
    return not actions and encode(State, hand.state) == before


def test_a_repeated_end_of_a_sample_is_ignored(hand: Hand) -> None:
    assert only(hand.finish(0, 0), act.Score) == [act.Score(RequestId(0, 0), 0, 0)]
    assert ignored(hand, hand.entries[-1].event)
    hand.score(0, 0)
    assert ignored(hand, hand.entries[-1].event)


def test_a_sample_of_an_earlier_epoch_is_ignored(hand: Hand) -> None:
    late = ev.SampleFinished(RequestId(0, 0), 0, "a", 10, Finish.STOP, (Segment(0, 0),))
    hand.tell(ev.SampleFailed(RequestId(0, 0), 0, "a", "out of memory"))
    assert hand.request(0, 0).epoch == 1
    assert ignored(hand, late)


def test_messages_about_an_ended_group_are_ignored(hand: Hand) -> None:
    for group in range(4):
        hand.complete(group)
    hand.train()
    assert 0 not in hand.state.groups
    assert ignored(hand, ev.Scored(RequestId(0, 0), 0, 1.0))
    assert ignored(hand, ev.SampleFailed(RequestId(0, 1), 0, "a", "late"))
    assert ignored(hand, ev.BatchAccepted(0)) and ignored(hand, ev.StepCommitted(0, "sum0"))


def test_a_trajectory_of_another_version_never_counts(hand: Hand) -> None:
    hand.finish(0, 0, segments=(Segment(0, 0), Segment(4, 1)))
    assert 0 not in hand.state.groups, "without samples_min one bad sample fails the group"
    ends = only(hand.entries[-1].actions, act.EndGroup)
    assert ends[0].end is act.End.FAILED and "version" in ends[0].reason
    hand.to_the_end()
    hand.audit()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_asked_for_again(hand: Hand, bad: float) -> None:
    hand.finish(0, 0)
    assert hand.score(0, 0, bad) == [act.Score(RequestId(0, 0), 0, 1)]
    assert ignored(hand, ev.Scored(RequestId(0, 0), 0, bad)), "said twice"
    assert hand.request(0, 0).score_failures == 1
    hand.score(0, 0, 0.5)
    assert hand.request(0, 0).reward == 0.5


def test_a_reward_that_keeps_failing_fails_its_group_and_the_prompt_comes_back(hand: Hand) -> None:
    hand.finish(0, 0)
    hand.tell(ev.ScoreFailed(RequestId(0, 0), 0, "raised ValueError"))
    hand.tell(ev.ScoreFailed(RequestId(0, 0), 1, "raised ValueError"))
    actions = hand.tell(ev.ScoreFailed(RequestId(0, 0), 2, "raised ValueError"))
    (end,) = only(actions, act.EndGroup)
    assert (end.group, end.end, end.reason) == (0, act.End.FAILED, "raised ValueError")
    assert only(actions, act.Abort) == [act.Abort("a", RequestId(0, 1), 0)]
    (issued,) = only(actions, act.IssueGroup)
    assert issued.prompt == 0 and issued.group != 0
    hand.to_the_end()
    hand.audit()


def test_a_reward_that_hangs_is_asked_for_again_after_its_deadline(hand: Hand) -> None:
    hand.finish(0, 0)
    hand.tell(ev.InstanceReport("a", 0, 0), after_s=30)
    assert not only(hand.tell(ev.Tick()), act.Score)
    hand.tell(ev.InstanceReport("a", 0, 0), after_s=31)
    assert only(hand.tell(ev.Tick()), act.Score) == [act.Score(RequestId(0, 0), 0, 1)]


def test_a_late_score_of_an_earlier_question_is_a_score_all_the_same(hand: Hand) -> None:
    hand.finish(0, 0)
    hand.tell(ev.InstanceReport("a", 0, 0), after_s=59)
    assert only(hand.tell(ev.Tick(), after_s=2), act.Score) == [act.Score(RequestId(0, 0), 0, 1)]
    hand.tell(ev.Scored(RequestId(0, 0), 0, 0.5))
    assert hand.request(0, 0).phase is Phase.SCORED and hand.request(0, 0).reward == 0.5
    assert ignored(hand, ev.Scored(RequestId(0, 0), 1, 0.7)), "one score is enough"
    assert ignored(hand, ev.ScoreFailed(RequestId(0, 0), 1, "killed"))
    hand.to_the_end()
    hand.audit()


def test_a_score_that_waits_in_a_queue_that_moves_is_not_asked_for_again(hand: Hand) -> None:
    """Its own clock starts when those before it have their answers."""
    hand.finish(0, 0)
    for group in (1, 2, 3):
        hand.finish(group, 0)
        hand.tell(ev.InstanceReport("a", 0, 0), after_s=40)
        hand.score(group, 0)
        assert not only(hand.tell(ev.Tick()), act.Score)
    hand.tell(ev.InstanceReport("a", 0, 0), after_s=40)
    assert not only(hand.tell(ev.Tick()), act.Score), "40 s since the last answer"
    hand.tell(ev.InstanceReport("a", 0, 0), after_s=21)
    assert only(hand.tell(ev.Tick()), act.Score) == [act.Score(RequestId(0, 0), 0, 1)]
    assert hand.request(0, 0).score_failures == 1


def test_a_sample_is_tried_elsewhere_until_its_attempts_are_used_up(hand: Hand) -> None:
    for attempt in range(2):
        actions = hand.tell(ev.SampleFailed(RequestId(0, 0), attempt, "a", "crash inside"))
        (again,) = only(actions, act.Dispatch)
        assert again.resume and again.epochs == (attempt + 1,)
    (end,) = only(hand.tell(ev.SampleFailed(RequestId(0, 0), 2, "a", "crash inside")), act.EndGroup)
    assert end.end is act.End.FAILED and "after 3 attempts" in end.reason


def test_a_final_failure_is_not_tried_again(hand: Hand) -> None:
    event = ev.SampleFailed(RequestId(0, 0), 0, "a", "prompt too long", final=True)
    (end,) = only(hand.tell(event), act.EndGroup)
    assert end.reason == "prompt too long"


def test_with_samples_min_a_group_trains_with_the_rest_masked() -> None:
    hand = Hand(batch_groups=1, group_size=3, samples_min=2, num_steps=2)
    hand.begin({"a": 64})
    hand.tell(ev.SampleFailed(RequestId(0, 1), 0, "a", "refused", final=True))
    fed = only(hand.complete(0), act.Feed)
    assert [f.samples for f in fed] == [(0, 2)]
    hand.train()
    hand.to_the_end()
    hand.audit()


def test_with_too_few_scored_samples_the_group_fails() -> None:
    hand = Hand(batch_groups=1, group_size=3, samples_min=2, num_steps=2)
    hand.begin({"a": 64})
    hand.tell(ev.SampleFailed(RequestId(0, 1), 0, "a", "refused", final=True))
    actions = hand.tell(ev.SampleFailed(RequestId(0, 2), 0, "a", "refused", final=True))
    assert [e.end for e in only(actions, act.EndGroup)] == [act.End.FAILED]
    assert [i.prompt for i in only(actions, act.IssueGroup)] == [0]


def test_equal_rewards_are_filtered_and_replaced_by_a_new_prompt() -> None:
    hand = Hand(batch_groups=2, group_size=2, filter_equal=True, num_steps=2)
    hand.begin({"a": 64})
    issued_before = hand.state.next_prompt
    actions = hand.complete(0, reward=1.0)
    assert [e.end for e in only(actions, act.EndGroup)] == [act.End.FILTERED]
    assert [i.prompt for i in only(actions, act.IssueGroup)] == [issued_before]
    hand.to_the_end()
    hand.audit()


def test_a_run_whose_groups_are_all_filtered_stops_and_names_the_cause() -> None:
    hand = Hand(batch_groups=2, group_size=2, filter_equal=True, filtered_max=5, num_steps=2)
    hand.begin({"a": 64})
    stops: list[act.Stop] = []
    while not stops:
        stops = only(hand.complete(next(iter(hand.state.groups)), reward=0.0), act.Stop)
    assert hand.state.num_ended[act.End.FILTERED] == 5
    assert not stops[0].done and "rewards were equal" in stops[0].reason
    assert not hand.tell(ev.Tick()), "a stopped run does nothing"
    hand.tell(ev.Resumed(hand.params))
    hand.tell(ev.LearnerJoined(0, 0))
    hand.join("a", versions=(0,))
    hand.to_the_end()
    assert hand.state.stopped == "all steps are trained"
    hand.audit()


def test_a_group_that_is_taken_ends_the_filtered_streak() -> None:
    hand = Hand(batch_groups=4, group_size=2, filter_equal=True, filtered_max=3, num_steps=2)
    hand.begin({"a": 64})
    for reward in (0.0, 0.0, None, 0.0, 0.0):
        group = hand.running()[0].id
        hand.complete(group, reward)
    assert hand.state.stopped is None and hand.state.filtered_streak == 2


def test_past_a_share_of_failures_the_run_stops_resumably() -> None:
    hand = Hand(batch_groups=2, group_size=1, failed_min=4, failed_share_max=0.5, num_steps=9)
    hand.begin({"a": 64})
    stops: list[act.Stop] = []
    failed = 0
    while not stops:
        group = hand.running()[0].id
        event = ev.SampleFailed(RequestId(group, 0), 0, "a", "broken", final=True)
        stops = only(hand.tell(event), act.Stop)
        failed += 1
    assert failed == 4 and not stops[0].done and "4 of 4 groups failed" in stops[0].reason


def test_the_user_may_stop_and_resume(hand: Hand) -> None:
    (stop,) = hand.tell(ev.StopRequested("SIGTERM"))
    assert stop == act.Stop("SIGTERM", False)
    hand.tell(ev.Resumed(hand.params))
    hand.tell(ev.LearnerJoined(0, 0))
    hand.join("a", versions=(0,))
    assert hand.request(0, 0).phase is Phase.RUNNING and hand.request(0, 0).epoch == 1
    hand.to_the_end()
    hand.audit()


def test_nothing_is_issued_before_the_first_learner_sealed_version_0() -> None:
    hand = Hand(batch_groups=2, group_size=1)
    hand.tell(ev.Started(hand.params))
    assert not only(hand.join("a", versions=(0,)), act.IssueGroup)
    assert only(hand.tell(ev.LearnerJoined(0, 0)), act.IssueGroup)


def test_no_more_groups_are_in_flight_than_the_limit() -> None:
    hand = Hand(batch_groups=5, group_size=1, max_staleness=4, inflight_groups=3)
    hand.begin({"a": 64})
    for _ in range(8):
        assert len(hand.running()) == 3
        hand.complete(hand.running()[0].id)


def test_admission_waits_while_too_many_groups_lie_ready() -> None:
    hand = Hand(batch_groups=1, group_size=1, max_staleness=4, inflight_groups=2, ready_max=2)
    hand.begin({"a": 64})
    hand.complete(0)  # closes step 0; what follows must wait for the learner
    assert only(hand.complete(1), act.IssueGroup), "one ready group is below the limit"
    assert not only(hand.complete(2), act.IssueGroup)
    assert hand.state.num_ready == 2
    assert only(hand.train(), act.IssueGroup), "the next step took one of them"


def test_a_group_larger_than_all_slots_together_runs_alone() -> None:
    hand = Hand(batch_groups=2, group_size=6, num_steps=2)
    hand.begin({"a": 2})
    assert len(hand.state.groups) == 1
    hand.to_the_end()
    hand.audit()


def test_every_event_has_its_handler() -> None:
    assert list(HANDLERS) == list(typing.get_args(ev.Event))
