"""What an earlier incarnation of a worker says late, or anybody twice, is not believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.orchestrate import request_load, unload
from dora_rl.core.placement import start_move
from dora_rl.core.state import Phase
from dora_rl.types import RequestId
from tests.kit.hand_driven import Hand, only


def two_lives() -> Hand:
    """Instance `a` has been lost and is there again: incarnation 1."""
    hand = Hand(batch_groups=2, group_size=2, num_steps=3)
    hand.begin({"a": 4, "b": 4})
    hand.tell(ev.InstanceLost("a", "died", incarnation=0))
    hand.join("a", 4, versions=(0,))
    return hand


def test_a_late_loss_of_an_earlier_incarnation_costs_nothing() -> None:
    hand = two_lives()
    hand.tell(ev.InstanceLost("a", "died", incarnation=0))
    assert "a" in hand.state.instances
    hand.tell(ev.InstanceLost("a", "died", incarnation=1))
    assert "a" not in hand.state.instances


def test_an_instance_that_is_gone_does_not_come_back_by_a_message_said_twice() -> None:
    hand = two_lives()
    joined = [e.event for e in hand.entries if isinstance(e.event, ev.InstanceJoined)]
    hand.tell(ev.InstanceLost("a", "died", incarnation=1))
    for again in joined:
        hand.tell(again)
    assert hand.state.instances.keys() == {"b"}


def test_a_loss_that_overtakes_its_join_is_a_loss() -> None:
    hand = two_lives()
    hand.tell(ev.InstanceLost("a", "died", incarnation=2))
    hand.join("a", 4, versions=(0,))
    assert hand.lives["a"] == 2 and "a" not in hand.state.instances


def test_a_report_of_an_earlier_incarnation_is_no_sign_of_life() -> None:
    hand = two_lives()
    silent = ev.InstanceReport("a", 500, 900, incarnation=0)
    hand.tell(silent, after_s=40.0)
    assert hand.state.instances["a"].decode_steps == 0
    hand.tell(ev.InstanceReport("b", 0, 0, incarnation=0))
    (restart,) = only(hand.tell(ev.Tick(), after_s=25.0), act.Restart)
    assert restart.instance == "a"


@pytest.mark.parametrize("known", [True, False])
def test_a_load_that_is_answered_twice_is_not_the_answer_to_a_later_load(known: bool) -> None:
    """Version 1 is loaded, unloaded and asked for again; then the first answer comes once more.

    Answers of earlier releases say no attempt, and are believed."""
    hand = Hand(batch_groups=1, group_size=1, num_steps=6, max_staleness=3, inflight_groups=3)
    hand.begin({"a": 1, "b": 4})
    inst = hand.state.instances["a"]
    loads: list[act.Load] = []
    while not loads:
        hand.complete(hand.running()[0].id)
        loads = [load for load in only(hand.train(), act.Load) if load.instance == "a"]
    first = ev.Loaded("a", loads[0].version, attempt=loads[0].attempt, incarnation=0)
    hand.tell(first)
    assert loads[0].version in inst.held
    state = hand.state
    actions: list[act.Action] = []
    give_up_and_want(hand, loads[0].version, actions)
    assert inst.loading == loads[0].version and only(actions, act.Load)[0].attempt == 2
    hand.tell(first if known else replace(first, attempt=-1, incarnation=-1))
    assert (loads[0].version in inst.held) is not known
    assert (state.versions[loads[0].version].holders.keys() >= {"a"}) is not known


def give_up_and_want(hand: Hand, version: int, out: list[act.Action]) -> None:
    """The instance gives the version up and wants it back."""
    inst = hand.state.instances["a"]
    for request in list(inst.requests):
        hand.finish(request.group, request.sample)
    unload(hand.state, inst, version, out)
    request_load(hand.state, inst, version, hand.now, out)


def test_a_move_that_is_answered_twice_is_not_the_answer_to_a_later_move() -> None:
    """a -> b -> a, and again to b: the first arrival at b is said once more."""
    hand = Hand(batch_groups=1, group_size=1, num_steps=3, inflight_groups=1)
    hand.begin({"a": 1, "b": 1})
    request = hand.request(0)
    home, other = request.instance or "", {"a": "b", "b": "a"}[request.instance or ""]
    moves: list[act.Move] = []
    for src, dst in ((home, other), (other, home), (home, other)):
        out: list[act.Action] = []
        start_move(hand.state, request, hand.state.instances[dst], hand.now, out)
        moves += only(out, act.Move)
        if len(moves) < 3:
            attempt = moves[-1].attempt
            hand.tell(ev.Moved(request.id, 0, src, dst, 5, 5, attempt=attempt, incarnation=0))
            assert request.phase is Phase.RUNNING
    first = ev.Moved(request.id, 0, home, other, 5, 5, attempt=moves[0].attempt, incarnation=0)
    hand.tell(first)
    assert request.phase is Phase.MOVING
    hand.tell(replace(first, attempt=moves[2].attempt))
    assert request.phase is Phase.RUNNING and request.instance == other


def test_a_sample_of_an_earlier_incarnation_is_not_believed() -> None:
    hand = two_lives()
    request = next(iter(hand.state.instances["a"].requests))
    hand.finish(*request, incarnation=0)
    hand.tell(ev.SampleFailed(request, hand.request(*request).epoch, "a", "broken", incarnation=0))
    assert hand.request(*request).phase is Phase.RUNNING
    hand.finish(*request, incarnation=1)
    assert hand.request(*request).phase is Phase.SCORING


def test_a_learner_joins_once_and_its_predecessor_is_not_heard() -> None:
    hand = Hand(batch_groups=1, group_size=1, num_steps=4, max_staleness=2)
    hand.begin({"a": 8})
    hand.complete(0)
    hand.tell(ev.BatchAccepted(0, incarnation=0))
    hand.tell(ev.StepCommitted(0, "sum0", incarnation=0))
    assert hand.state.committed == 1
    hand.tell(ev.LearnerJoined(0, 0, incarnation=0))  # once more, and by now another version
    assert hand.state.learner.alive and hand.state.committed == 1
    hand.tell(ev.LearnerLost("died", incarnation=0))
    hand.tell(ev.LearnerJoined(1, 1, incarnation=1))
    hand.tell(ev.LearnerLost("died", incarnation=0))
    assert hand.state.learner.alive
    hand.complete(hand.running()[0].id)
    hand.tell(ev.BatchAccepted(1, incarnation=0))
    assert hand.state.filling == 1
    hand.tell(ev.LearnerReport(1, 77, incarnation=0))
    assert hand.state.learner.progress == -1
    hand.to_the_end()
    hand.audit()


def test_after_a_resume_workers_may_begin_to_count_again() -> None:
    hand = two_lives()
    hand.tell(ev.Resumed(hand.params))
    hand.tell(ev.LearnerJoined(0, 0, incarnation=0))
    hand.tell(ev.InstanceJoined("a", 8, versions=(0,), life=0))
    assert "a" in hand.state.instances and hand.state.learner.alive
    assert hand.state.request(RequestId(0, 0)) is not None
    hand.to_the_end()
    hand.audit()
