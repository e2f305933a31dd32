"""Whatever is lost, nothing is lost: instances, loads, moves, the learner, the controller."""

from __future__ import annotations

import signal

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Deadlines, MoveCost
from dora_rl.core.state import Phase
from dora_rl.core.waits import waits
from dora_rl.types import Finish, RequestId, Segment
from tests.kit.hand_driven import Hand, only


def versions_apart(**params: object) -> Hand:
    """Version 0 still has a request, version 1 gets its first: an instance is loading it."""
    hand = Hand(
        batch_groups=1, group_size=1, num_steps=6, max_staleness=3, inflight_groups=2, **params
    )
    hand.begin({"a": 2, "b": 2})
    hand.complete(0)
    hand.train()
    hand.complete(2)
    assert [live.num_active for live in hand.state.versions.values()] == [1, 1]
    return hand


# Instances.


def test_the_requests_of_a_lost_instance_continue_elsewhere_on_their_version() -> None:
    hand = Hand(batch_groups=4, group_size=2, num_steps=2, inflight_groups=4)
    hand.begin({"a": 4, "b": 8})
    on_a = list(hand.state.instances["a"].requests)
    assert on_a
    actions = hand.tell(ev.InstanceLost("a", "process died"))
    again = [
        (RequestId(d.group, s), d.version, d.instance, d.resume)
        for d in only(actions, act.Dispatch)
        for s in d.samples
    ]
    assert sorted(again) == sorted((rid, 0, "b", True) for rid in on_a)
    hand.to_the_end()
    hand.audit()


def test_late_words_of_a_lost_instance_are_ignored() -> None:
    hand = Hand(batch_groups=4, group_size=1, num_steps=2)
    hand.begin({"a": 2, "b": 2})
    rid = next(iter(hand.state.instances["a"].requests))
    hand.tell(ev.InstanceLost("a", "process died"))
    before = hand.state.num_active
    late: list[ev.Event] = [
        ev.SampleFinished(rid, 0, "a", 9, Finish.STOP, (Segment(0, 0),)),
        ev.SampleFailed(rid, 0, "a", "killed"),
        ev.Loaded("a", 0),
        ev.LoadFailed("a", 0, "killed"),
        ev.InstanceReport("a", 5, 5),
        ev.Moved(rid, 0, "a", "b", 1, 1),
        ev.MoveFailed(rid, 0, "a", "b", True, "killed"),
        ev.InstanceLost("a", "again"),
    ]
    for event in late:
        hand.tell(event)
        assert hand.state.num_active == before and "a" not in hand.state.instances
    hand.to_the_end()
    hand.audit()


def test_an_instance_that_joins_again_is_a_new_one_and_a_repeated_message_is_not() -> None:
    hand = Hand(batch_groups=4, group_size=1, num_steps=2)
    hand.begin({"a": 4})
    joined = hand.entries[1].event
    hand.tell(joined)
    assert hand.request(0).epoch == 0, "the same message twice changes nothing"
    hand.join("a", 4, versions=(0,))
    assert hand.request(0).epoch == 1 and hand.request(0).phase is Phase.RUNNING
    hand.to_the_end()
    hand.audit()


def test_a_silent_instance_is_restarted_after_its_deadline_and_not_before() -> None:
    hand = Hand(batch_groups=4, group_size=1, num_steps=2)
    hand.begin({"a": 4, "b": 4})
    hand.tell(ev.InstanceReport("a", 1, 1), after_s=50)
    assert not only(hand.tell(ev.Tick(), after_s=9), act.Restart)
    restarted = only(hand.tell(ev.Tick(), after_s=2), act.Restart)
    assert [r.instance for r in restarted] == ["b"] and "no report" in restarted[0].reason
    assert "a" in hand.state.instances


def watched(**params: object) -> Hand:
    rules = {"losses_max": 2, "group_failures_max": 4, "deadlines": Deadlines(progress_s=100)}
    hand = Hand(batch_groups=4, group_size=1, num_steps=2, inflight_groups=4, **(rules | params))
    hand.begin({"a": 4, "b": 4})
    return hand


def test_an_instance_that_reports_and_decodes_nothing_is_restarted() -> None:
    hand = watched()
    restarts: list[act.Restart] = []
    for turn in range(1, 14):
        hand.tell(ev.InstanceReport("b", 50 * turn, 1), after_s=10)
        restarts += only(hand.tell(ev.InstanceReport("a", 0, 1)), act.Restart)
        assert bool(restarts) == (turn >= 10)
    (restart,) = restarts
    assert restart.instance == "a" and "no token for 100 s" in restart.reason
    assert all(r.attempts == 0 for g in hand.state.groups.values() for r in g.requests)
    assert {r.instance for g in hand.state.groups.values() for r in g.requests} == {"b"}
    hand.join("a", 4, versions=(0,))
    hand.to_the_end()
    hand.audit()


def test_requests_between_two_turns_are_not_expected_to_gain() -> None:
    """The environment answers when it answers; it has a deadline of its own."""
    hand = watched()
    on_a = len(hand.state.instances["a"].requests)
    for _ in range(50):
        hand.tell(ev.InstanceReport("b", 0, 1, num_waiting=4), after_s=10)
        assert not only(hand.tell(ev.InstanceReport("a", 0, 1, num_waiting=on_a)), act.Restart)
    said: list[act.Action] = []
    for _ in range(11):  # one of them is back at work, and nothing comes of it
        hand.tell(ev.InstanceReport("b", 0, 1, num_waiting=4), after_s=10)
        said += hand.tell(ev.InstanceReport("a", 0, 1, num_waiting=on_a - 1))
    assert [r.instance for r in only(said, act.Restart)] == ["a"]


def test_an_idle_instance_is_not_expected_to_gain() -> None:
    hand = watched(max_staleness=0)
    for group in range(4):
        hand.complete(group)
    for _ in range(50):
        for name in "ab":
            assert not only(hand.tell(ev.InstanceReport(name, 7, 0), after_s=5), act.Restart)


def test_a_request_that_stands_still_among_others_is_started_again() -> None:
    hand = watched()
    rid = next(iter(hand.state.instances["a"].requests))
    said: list[act.Action] = []
    for turn in range(1, 12):
        hand.tell(ev.InstanceReport("b", 50 * turn, 1), after_s=10)
        said += hand.tell(ev.InstanceReport("a", 50 * turn, 1, still=(rid,)))
        assert bool(only(said, act.Abort)) == (turn >= 11)
    assert only(said, act.Abort) == [act.Abort("a", rid, 0)]
    (again,) = only(said, act.Dispatch)
    assert (again.group, again.version, again.resume) == (rid.group, 0, True)
    assert hand.request(*rid).attempts == 1 and "a" in hand.state.instances
    hand.to_the_end()
    hand.audit()


def test_a_request_that_stood_still_for_a_while_is_left_alone() -> None:
    hand = watched()
    rid = next(iter(hand.state.instances["a"].requests))
    for turn in range(1, 60):
        still = (rid,) if turn % 8 else ()
        hand.tell(ev.InstanceReport("b", 50 * turn, 1), after_s=10)
        said = hand.tell(ev.InstanceReport("a", 50 * turn, 1, still=still))
        assert not only(said, act.Abort)


def test_a_deadline_that_falls_on_a_rounding_error_is_looked_at_once() -> None:
    """5.1 + 60 <= 65.1, and yet 65.1 - 5.1 < 60."""
    hand = Hand(batch_groups=4, group_size=1, num_steps=2)
    hand.tell(ev.Started(hand.params))
    hand.now = 5.1
    hand.join("a", 4, versions=(0,))
    hand.now = 65.1

    def give_up(signum: int, frame: object) -> None:
        raise TimeoutError("the tick does not come back")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(3)
    try:
        hand.tell(ev.Tick())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Loads.


def test_a_load_that_fails_is_tried_again_from_the_store_then_the_instance_restarted() -> None:
    hand = versions_apart(attempts_max=3)
    loading = next(i for i in hand.state.instances.values() if i.loading == 1)
    name = loading.id
    for _ in range(2):
        actions = hand.tell(ev.LoadFailed(name, 1, "checksum mismatch"))
        assert only(actions, act.Load) == [act.Load(name, 1, None)], "from the store, not a peer"
    (restart,) = only(hand.tell(ev.LoadFailed(name, 1, "checksum mismatch")), act.Restart)
    assert restart.instance == name and "checksum mismatch" in restart.reason
    assert name not in hand.state.instances
    hand.join(name, 2)
    hand.to_the_end()
    hand.audit()


def test_a_load_without_an_answer_is_tried_again_after_its_deadline() -> None:
    hand = versions_apart()
    name = next(i.id for i in hand.state.instances.values() if i.loading == 1)
    for _ in range(6):
        for inst in ("a", "b"):
            hand.tell(ev.InstanceReport(inst, 0, 0), after_s=25)
    actions = hand.tell(ev.Tick())
    assert act.Load(name, 1, None) in actions


def test_no_request_runs_on_weights_that_were_not_verified() -> None:
    hand = versions_apart()
    name = next(i.id for i in hand.state.instances.values() if i.loading == 1)
    failed = hand.tell(ev.LoadFailed(name, 1, "canary differs"))
    assert not [d for d in only(failed, act.Dispatch) if d.version == 1]
    loaded = hand.tell(ev.Loaded(name, 1))
    assert [d.instance for d in only(loaded, act.Dispatch) if d.version == 1]


# Moves.


def moving(how: MoveCost) -> tuple[Hand, act.Move]:
    """KV pressure on `a` makes the core move its youngest request to `b`."""
    hand = Hand(batch_groups=4, group_size=1, num_steps=3, inflight_groups=4, cost=how)
    hand.begin({"a": 4, "b": 4}, kv_tokens_max=1_000)
    actions = hand.tell(ev.InstanceReport("a", 600, 990))
    (move,) = only(actions, act.Move)
    assert (move.src, move.dst, move.version) == ("a", "b", 0)
    return hand, move


CHEAP_KV = MoveCost(kv_bytes_per_token=1, link_bytes_per_s=1e9, move_overhead_s=0)
DEAR_KV = MoveCost(kv_bytes_per_token=1e6, link_bytes_per_s=1e3, move_overhead_s=1)


def test_kv_pressure_moves_the_youngest_request_to_a_holder_with_room() -> None:
    hand, move = moving(CHEAP_KV)
    assert move.how is act.How.KV and hand.request(move.request.group).phase is Phase.MOVING
    hand.tell(ev.Moved(move.request, move.epoch, "a", "b", 600, 600))
    request = hand.request(move.request.group)
    assert (request.phase, request.instance, request.epoch) == (Phase.RUNNING, "b", 0)
    hand.to_the_end()
    hand.audit()


def test_a_move_is_a_new_prefill_where_that_is_faster() -> None:
    _, move = moving(DEAR_KV)
    assert move.how is act.How.PREFILL


def test_kv_pressure_without_a_peer_spills_to_the_host_and_comes_back() -> None:
    hand = Hand(batch_groups=4, group_size=1, num_steps=3, inflight_groups=4)
    hand.begin({"a": 8}, kv_tokens_max=1_000)
    (park, *_) = only(hand.tell(ev.InstanceReport("a", 600, 990)), act.Park)
    assert hand.request(park.request.group).phase is Phase.PENDING
    assert hand.request(park.request.group).instance == "a", "its KV stays with its instance"
    back = only(hand.tell(ev.InstanceReport("a", 700, 300)), act.Unpark)
    assert act.Unpark("a", park.request, park.epoch, 0) in back
    hand.to_the_end()
    hand.audit()


def test_one_request_always_stays_under_pressure() -> None:
    hand = Hand(batch_groups=1, group_size=1, num_steps=3, inflight_groups=1)
    hand.begin({"a": 8}, kv_tokens_max=1_000)
    assert not only(hand.tell(ev.InstanceReport("a", 600, 999)), act.Park)


def test_a_move_that_fails_and_was_kept_goes_on_at_its_source() -> None:
    hand, move = moving(CHEAP_KV)
    hand.tell(ev.MoveFailed(move.request, move.epoch, "a", "b", True, "connection reset"))
    request = hand.request(move.request.group)
    assert (request.phase, request.instance, request.epoch) == (Phase.RUNNING, "a", move.epoch)
    assert not hand.state.instances["b"].incoming
    hand.to_the_end()
    hand.audit()


def test_a_move_that_fails_and_was_lost_restarts_from_the_journal() -> None:
    hand, move = moving(CHEAP_KV)
    actions = hand.tell(ev.MoveFailed(move.request, move.epoch, "a", "b", False, "half-way"))
    assert act.Abort("b", move.request, move.epoch) in actions
    (again,) = [d for d in only(actions, act.Dispatch) if d.group == move.request.group]
    assert again.resume and again.version == 0 and again.epochs == (move.epoch + 1,)
    hand.tell(ev.Moved(move.request, move.epoch, "a", "b", 1, 1))  # late: changes nothing
    assert hand.request(move.request.group).epoch == move.epoch + 1
    hand.to_the_end()
    hand.audit()


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_move_survives_the_loss_of_either_end(lost: str) -> None:
    hand, move = moving(CHEAP_KV)
    actions = hand.tell(ev.InstanceLost(lost, "died"))
    other = "b" if lost == "a" else "a"
    assert act.Abort(other, move.request, move.epoch) in actions
    hand.tell(ev.InstanceReport(other, 700, 100))
    request = hand.request(move.request.group)
    assert (request.phase, request.epoch, request.instance) == (Phase.RUNNING, 1, other)
    hand.to_the_end()
    hand.audit()


def test_a_move_without_progress_is_given_up_after_its_deadline() -> None:
    hand, move = moving(CHEAP_KV)
    for _ in range(2):
        for name in ("a", "b"):
            hand.tell(ev.InstanceReport(name, 600, 100), after_s=16)
    actions = hand.tell(ev.Tick())
    aborted = {a.instance for a in only(actions, act.Abort) if a.request == move.request}
    assert aborted == {"a", "b"} and hand.request(move.request.group).epoch == 1


def test_a_sample_that_ends_while_it_moves_counts_once() -> None:
    hand, move = moving(CHEAP_KV)
    hand.finish(move.request.group)
    assert not hand.state.instances["b"].incoming
    hand.tell(ev.Moved(move.request, move.epoch, "a", "b", 1, 1))
    hand.to_the_end()
    hand.audit()


# The learner.


def test_a_new_learner_is_fed_again_what_was_not_committed() -> None:
    hand = Hand(batch_groups=3, group_size=1, num_steps=2)
    hand.begin({"a": 8})
    hand.complete(0)
    hand.complete(2)
    hand.tell(ev.LearnerLost("process died"))
    assert not only(hand.complete(1), act.Feed), "nobody is there to be fed"
    actions = hand.tell(ev.LearnerJoined(0, 0))
    assert [f.group for f in only(actions, act.Feed)] == [0, 2, 1]
    assert only(actions, act.CloseStep) == [act.CloseStep(0, (0, 2, 1))]
    hand.to_the_end()
    hand.audit()


@pytest.mark.parametrize("sealed", [0, 1])
def test_a_new_learner_is_fed_again_what_was_fed_ahead(sealed: int) -> None:
    """The learner trained on groups of step 1 when it died; version 1 was sealed, or was not."""
    hand = Hand(batch_groups=2, group_size=1, num_steps=3)
    hand.begin({"a": 8})
    hand.complete(0)
    hand.complete(1)
    hand.tell(ev.BatchAccepted(0))
    assert [(f.step, f.group) for f in only(hand.complete(2), act.Feed)] == [(1, 2)]
    hand.tell(ev.LearnerLost("process died"))
    actions = hand.tell(ev.LearnerJoined(sealed, sealed))
    again = [(f.step, f.group) for f in only(actions, act.Feed)]
    assert again == ([(1, 2)] if sealed else [(0, 0), (0, 1), (1, 2)])
    hand.to_the_end()
    hand.audit()


def test_a_version_that_was_sealed_and_not_logged_counts_as_committed() -> None:
    """The learner died between sealing version 1 and telling the controller."""
    hand = Hand(batch_groups=2, group_size=1, num_steps=3)
    hand.begin({"a": 8})
    hand.complete(0)
    hand.complete(1)
    hand.tell(ev.LearnerLost("process died"))
    actions = hand.tell(ev.LearnerJoined(1, 1))
    assert [(e.group, e.step) for e in only(actions, act.EndGroup)] == [(0, 0), (1, 0)]
    assert (hand.state.committed, hand.state.filling) == (1, 1)
    assert not [f for f in only(actions, act.Feed) if f.step == 0], "never trained twice"
    hand.to_the_end()
    hand.audit()


def test_a_learner_from_nowhere_is_our_own_mistake() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=3)
    hand.begin({"a": 8})
    with pytest.raises(AssertionError, match="the log ends at 0"):
        hand.tell(ev.LearnerJoined(2, 2))


def test_an_older_optimizer_is_said_so() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=5)
    hand.begin({"a": 8})
    hand.complete(0)
    hand.complete(1)
    hand.train()
    hand.tell(ev.LearnerLost("process died"))
    actions = hand.tell(ev.LearnerJoined(1, 0))
    assert only(actions, act.OptimizerRewound) == [act.OptimizerRewound(1, 0)]


def test_a_learner_without_progress_is_restarted_and_one_with_progress_is_not() -> None:
    hand = Hand(batch_groups=1, group_size=1, num_steps=3)
    hand.begin({"a": 8})
    hand.complete(0)
    restarts: list[act.Action] = []
    for turn in range(75):
        hand.tell(ev.InstanceReport("a", 0, 0), after_s=50)
        if turn < 25:
            hand.tell(ev.LearnerReport(0, turn))
        restarts += only(hand.tell(ev.Tick()), act.RestartLearner)
        if turn == 25:
            assert not restarts
    assert restarts
    hand.tell(ev.LearnerJoined(0, 0))
    hand.to_the_end()
    hand.audit()


def test_every_wait_has_a_name() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=3)
    hand.tell(ev.Started(hand.params))
    assert [(w.who, w.what) for w in waits(hand.state)] == [("controller", "a learner to join")]
    hand.join("a", 1)
    hand.tell(ev.LearnerJoined(0, 0))
    words = {w.who: w.what for w in waits(hand.state)}
    assert words["a"] == "version 0 from the store"
    assert words["step 0"].startswith("2 more groups") and "1 requests" in words
    hand.load_all()
    hand.complete(0)
    hand.complete(1)
    words = {w.who: w.what for w in waits(hand.state)}
    assert words["step 0"] == "the learner to finish step 0"


def test_a_commit_that_overtakes_the_acceptance_says_both() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=3, max_staleness=1)
    hand.begin({"a": 8})
    hand.tell(ev.StepCommitted(0, "x"))  # of nothing that was sent
    assert hand.state.committed == 0
    hand.complete(0)
    hand.complete(1)
    assert hand.state.batches[0].close_sent and hand.state.filling == 0
    actions = hand.tell(ev.StepCommitted(0, "x"))
    assert {a.group for a in only(actions, act.EndGroup)} == {0, 1}
    assert (hand.state.committed, hand.state.filling) == (1, 1)
    assert not hand.tell(ev.BatchAccepted(0)), "late: changes nothing"
    assert (hand.state.committed, hand.state.filling) == (1, 1)
    hand.to_the_end()
    hand.audit()


def test_a_commit_from_before_a_restart_of_the_learner_is_no_commit_of_the_batch_fed_again() -> (
    None
):
    hand = Hand(batch_groups=1, group_size=1, num_steps=3, max_staleness=1)
    hand.begin({"a": 8})
    hand.complete(0)
    hand.tell(ev.LearnerLost("died"))
    hand.tell(ev.LearnerJoined(1, 1))  # it had sealed version 1
    assert hand.state.committed == 1
    hand.tell(ev.StepCommitted(0, "x"))  # its last words, late
    assert (hand.state.committed, hand.state.filling) == (1, 1)
    hand.to_the_end()
    hand.audit()
