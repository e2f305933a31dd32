"""Who killed the instance: losses, progress, trials alone, and the prompt that is found."""

from __future__ import annotations

from typing import Any

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.state import GENERATING, Phase
from dora_rl.types import RequestId
from tests.kit.hand_driven import Hand, only

ATTEMPTS = 3


def at_work(slots: int = 16, instances: str = "a", **params: Any) -> Hand:
    """Four groups of two, all running."""
    rules = {"losses_max": 2, "group_failures_max": ATTEMPTS, "attempts_max": ATTEMPTS}
    sizes = {"batch_groups": 4, "group_size": 2, "num_steps": 3, "inflight_groups": 4}
    hand = Hand(**(rules | sizes | params))
    hand.begin(dict.fromkeys(instances, slots))
    return hand


def lose(hand: Hand, name: str = "a", *, gained: int = 0) -> list[act.Action]:
    """The instance is lost and comes back; whoever was not a killer had gained some tokens."""
    actions = hand.tell(ev.InstanceLost(name, "its process ended"))
    actions += hand.join(name, 16, versions=tuple(hand.state.versions))
    return actions + tell_continued(hand, actions, gained)


def tell_continued(hand: Hand, actions: list[act.Action], gained: int) -> list[act.Action]:
    told: list[act.Action] = []
    for order in only(actions, act.Dispatch):
        for sample, epoch in zip(order.samples, order.epochs, strict=True):
            request = hand.state.request(RequestId(order.group, sample))
            if gained and order.resume and request is not None and order.prompt != 0:
                more = ev.Continued(request.id, epoch, request.kept + gained)
                told += hand.tell(more)
    return told


def runs_alone(hand: Hand) -> RequestId | None:
    """The suspect that is tried now, if one is."""
    for inst in hand.state.instances.values():
        if inst.isolating is not None and inst.load == 1:
            return next(iter(inst.requests))
    return None


def test_a_response_of_any_length_outlives_its_instances() -> None:
    """Instances that live for a minute: each loss finds more in the journal than the one before."""
    hand = at_work()
    for life in range(20):
        lose(hand, gained=100)
        requests = [r for g in hand.state.groups.values() for r in g.requests if g.prompt != 0]
        assert {(r.attempts, r.losses, r.suspect) for r in requests} == {(0, 0, False)}, life
        # Prompt 0 gains nothing; here it is the journal that is slow, not the prompt.
        for request in hand.state.groups[0].requests:
            hand.tell(ev.Continued(request.id, request.epoch, life + 1))
    assert not [e for entry in hand.entries for e in only(entry.actions, act.EndGroup)]
    hand.to_the_end()
    hand.audit()


def test_losses_without_progress_in_between_make_a_suspect_and_one_loss_does_not() -> None:
    hand = at_work()
    lose(hand)
    assert not any(r.suspect for g in hand.state.groups.values() for r in g.requests)
    assert not any(r.attempts for g in hand.state.groups.values() for r in g.requests)
    lose(hand, gained=100)
    suspects = [r for g in hand.state.groups.values() for r in g.requests if r.suspect]
    assert suspects and runs_alone(hand) is not None


def test_a_prompt_that_kills_is_found_alone_and_the_innocents_keep_going() -> None:
    hand = at_work()
    aside: list[act.SetAside] = []
    losses = 0
    while not aside:
        assert losses < 2 + ATTEMPTS, "it is found within losses_max + attempts_max losses"
        losses += 1
        aside = only(lose(hand, gained=100), act.SetAside)
    ((prompt, kills),) = [(a.prompt, a.kills) for a in aside]
    assert (prompt, kills) == (0, True) and "alone" in aside[0].reason
    ends = [e for entry in hand.entries for e in only(entry.actions, act.EndGroup)]
    assert [e.group for e in ends] == [0], "nobody else failed"
    assert losses == 2 + ATTEMPTS
    hand.to_the_end()
    issued = [a for entry in hand.entries for a in only(entry.actions, act.IssueGroup)]
    assert [a.group for a in issued if a.prompt == 0] == [0], "it is not issued again"
    hand.audit()


def test_the_others_wait_parked_while_a_suspect_is_tried_and_come_back() -> None:
    """Two suspects of prompt 0 and six others on one instance: they lose no token."""
    hand = at_work()
    lose(hand, gained=100)
    lose(hand, gained=100)
    first = runs_alone(hand)
    assert first is not None and first.group == 0
    actions = hand.tell(ev.InstanceReport("a", 1_000, 0))  # it decodes, and decodes
    second = runs_alone(hand)
    assert second == RequestId(0, 1), "then the next one"
    assert hand.request(*first).suspect is False
    actions = hand.tell(ev.InstanceReport("a", 2_000, 0))
    assert runs_alone(hand) is None and hand.state.instances["a"].isolating is None
    assert only(actions, act.Unpark) or only(actions, act.Dispatch)
    running = [r for g in hand.state.groups.values() for r in g.requests]
    assert all(r.phase is Phase.RUNNING for r in running)
    hand.to_the_end()
    hand.audit()


def test_a_running_instance_is_emptied_for_the_trial() -> None:
    hand = at_work(instances="ab", slots=8)
    for name in "ab":  # both samples of prompt 0 are lost with whoever has them
        holder = hand.request(0).instance or name
        lose(hand, holder, gained=100)
    hand.settle()
    alone = runs_alone(hand)
    assert alone is not None and alone.group == 0
    where = hand.request(*alone).instance
    assert where is not None
    others = [r for g in hand.state.groups.values() for r in g.requests if r.id != alone]
    assert not [r for r in others if r.phase is Phase.RUNNING and r.instance == where]
    hand.to_the_end()
    hand.audit()


def test_a_suspect_is_not_tried_where_it_was_lost_if_another_holds_its_version() -> None:
    """A bad host must not make a bad prompt."""
    hand = at_work(instances="ab", slots=8)
    bad = hand.request(0).instance or ""
    good = "b" if bad == "a" else "a"
    request = hand.request(0)
    request.losses = 1  # as if it had been lost elsewhere before
    lose(hand, bad)
    hand.settle()
    assert request.suspect and request.lost_on == bad
    alone = runs_alone(hand)
    assert alone is not None and hand.request(*alone).instance == good


def many_suspects(**params: Any) -> Hand:
    """The whole fleet was lost twice before anybody had gained a token: 64 suspects."""
    hand = at_work(slots=64, batch_groups=32, inflight_groups=32, clear_tokens=10, **params)
    for _ in range(2):
        hand.tell(ev.InstanceLost("a", "power failure"))
        hand.join("a", 64, versions=(0,))
    assert sum(r.suspect for g in hand.state.groups.values() for r in g.requests) == 64
    return hand


def test_many_suspects_are_cleared_a_crowd_at_a_time() -> None:
    hand = many_suspects()
    num_trials = 0
    while hand.state.instances["a"].isolating is not None:
        num_trials += 1
        hand.tell(ev.InstanceReport("a", 10 * num_trials, 0))
    assert num_trials < 32, "the world is not put in a row"
    running = [r for g in hand.state.groups.values() for r in g.requests]
    assert all(r.phase is Phase.RUNNING and not r.suspect for r in running)
    hand.to_the_end()
    hand.audit()


def test_a_crowd_that_loses_its_instance_is_halved_until_the_killer_is_alone() -> None:
    hand = many_suspects()
    killer, losses, steps = RequestId(20, 1), 2, 0
    while 20 in hand.state.groups:
        inst = hand.state.instances["a"]
        if killer in inst.requests:
            losses += 1
            steps = 0
            hand.tell(ev.InstanceLost("a", "its process ended"))
            hand.join("a", 64, versions=(0,))
        else:
            steps += 10
            hand.tell(ev.InstanceReport("a", steps, 0))
        assert losses < 20
    assert losses <= 2 + 3 + ATTEMPTS, "losses_max, log2 of the crowd, attempts_max"
    ends = [e for entry in hand.entries for e in only(entry.actions, act.EndGroup)]
    assert [e.group for e in ends] == [20]
    hand.to_the_end()
    hand.audit()


def test_a_wrong_clearing_asks_for_more_the_next_time() -> None:
    """A long prompt takes steps and gains nothing: clearing it was a mistake, made once a size."""
    hand = at_work(clear_tokens=10)
    lose(hand, gained=100)
    lose(hand, gained=100)
    request = hand.request(0, 0)
    hand.tell(ev.InstanceReport("a", 10, 0))
    assert not request.suspect and request.clearings == 1
    hand.tell(ev.InstanceReport("a", 20, 0))  # now the other sample is cleared, and all run again
    assert request.phase is Phase.RUNNING and runs_alone(hand) is None
    lose(hand, gained=100)
    assert request.suspect, "one more loss is enough"
    while runs_alone(hand) != request.id:
        other = runs_alone(hand)
        assert other is not None
        hand.finish(*other)
    hand.tell(ev.InstanceReport("a", 10, 0))
    assert request.suspect
    hand.tell(ev.InstanceReport("a", 20, 0))
    assert not request.suspect


def test_a_late_word_of_the_journal_clears_whoever_waits_for_a_trial() -> None:
    hand = at_work()
    lose(hand)
    lose(hand)
    waiting = [r for g in hand.state.groups.values() for r in g.requests]
    waiting = [r for r in waiting if r.suspect and r.phase is Phase.PENDING]
    assert waiting
    for request in waiting:
        hand.tell(ev.Continued(request.id, request.epoch - 1, 50))
        assert not request.suspect
    hand.to_the_end()
    hand.audit()


def test_a_trial_ends_with_its_version_and_with_its_instance() -> None:
    hand = at_work(instances="ab", slots=16)
    for name in "ab":
        lose(hand, name)
    hand.settle()
    where = next(i for i in hand.state.instances.values() if i.isolating is not None)
    hand.tell(ev.InstanceLost(where.id, "gone for good"))
    hand.to_the_end()
    hand.audit()


def test_what_is_parked_is_no_suspect() -> None:
    hand = Hand(
        batch_groups=4, group_size=1, num_steps=3, inflight_groups=4, losses_max=1,
        group_failures_max=4,
    )  # fmt: skip
    hand.begin({"a": 8}, kv_tokens_max=1_000)
    (park, *_) = only(hand.tell(ev.InstanceReport("a", 600, 990)), act.Park)
    hand.tell(ev.InstanceLost("a", "died"))
    requests = [r for g in hand.state.groups.values() for r in g.requests if r.phase in GENERATING]
    assert {r.id: r.suspect for r in requests}[park.request] is False
    assert any(r.suspect for r in requests)


def test_without_the_rule_every_loss_is_an_attempt() -> None:
    """As in logs that were written before it."""
    hand = at_work(losses_max=0, group_failures_max=0, attempts_max=2)
    lose(hand, gained=100)
    ends = only(hand.tell(ev.InstanceLost("a", "again")), act.EndGroup)
    assert any(e.end is act.End.FAILED for e in ends)


# Faults that repeat.


@pytest.mark.parametrize("limit", [0, 5])
def test_instances_that_are_lost_before_anything_is_gained_stop_the_run(limit: int) -> None:
    hand = at_work(instance_losses_max=limit, attempts_max=100, group_failures_max=100)
    for _ in range(4):
        lose(hand)
    assert hand.state.stopped is None
    stops = only(hand.tell(ev.InstanceLost("a", "out of memory")), act.Stop)
    assert bool(stops) == bool(limit)
    if stops:
        assert not stops[0].done and "out of memory" in stops[0].reason
        hand.tell(ev.Resumed(hand.params))
        assert hand.state.stopped is None and hand.state.instance_losses == 0
    hand.join("a", 16, versions=(0,))
    hand.tell(ev.LearnerJoined(0, 0))
    hand.to_the_end()
    hand.audit()


def test_instances_that_are_lost_while_something_is_gained_do_not() -> None:
    hand = at_work(instance_losses_max=3)
    for _ in range(20):
        lose(hand, gained=10)
        for request in hand.state.groups[0].requests:
            hand.tell(ev.Continued(request.id, request.epoch, request.kept + 1))
    assert hand.state.stopped is None


def test_idle_instances_may_come_and_go() -> None:
    hand = at_work(slots=16, instances="ab", instance_losses_max=3)
    for group in list(hand.state.groups):
        hand.complete(group)
    for _ in range(10):
        idle = [i.id for i in hand.state.instances.values() if not i.load and i.loading is None]
        if not idle:
            break
        lose(hand, idle[0])
    assert hand.state.stopped is None


def test_a_learner_that_is_lost_three_times_in_one_step_stops_the_run() -> None:
    hand = at_work(trainer_losses_max=3)
    for group in range(4):
        hand.complete(group)
    for _ in range(2):
        hand.tell(ev.LearnerLost("out of memory"))
        hand.tell(ev.LearnerLost("out of memory"))  # said twice is lost once
        hand.tell(ev.LearnerJoined(0, 0))
    (stop,) = only(hand.tell(ev.LearnerLost("out of memory")), act.Stop)
    assert not stop.done and "3 times in step 0" in stop.reason and "out of memory" in stop.reason
    hand.tell(ev.Resumed(hand.params))
    hand.join("a", 16, versions=(0,))
    hand.tell(ev.LearnerJoined(0, 0))
    hand.to_the_end()
    hand.audit()


def test_a_learner_that_commits_in_between_does_not() -> None:
    hand = at_work(trainer_losses_max=3, num_steps=5)
    for step in range(4):
        for _ in range(2):
            hand.tell(ev.LearnerLost("out of memory"))
            hand.tell(ev.LearnerJoined(step, step))
        while not hand.state.batches[step].close_sent:
            hand.complete(next(g.id for g in hand.running()))
        hand.train()
    assert hand.state.stopped is None


def test_a_learner_without_progress_counts_as_lost() -> None:
    hand = at_work(trainer_losses_max=1)
    for group in range(4):
        hand.complete(group)
    said: list[act.Action] = []
    for _ in range(80):
        hand.tell(ev.InstanceReport("a", 0, 0), after_s=30)
        said += hand.tell(ev.Tick())
    (stop,) = only(said, act.Stop)
    assert "no progress" in stop.reason


def test_a_version_that_every_instance_refuses_stops_the_run() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=3, load_failures_max=5, attempts_max=2)
    hand.tell(ev.Started(hand.params))
    hand.join("a", 4)
    hand.join("b", 4)
    hand.tell(ev.LearnerJoined(0, 0))
    stops: list[act.Stop] = []
    for _ in range(10):
        for name in "ab":
            inst = hand.state.instances.get(name)
            if inst is None:
                hand.join(name, 4)
            elif inst.loading is not None and hand.state.stopped is None:
                stops += only(hand.tell(ev.LoadFailed(name, 0, "canary differs")), act.Stop)
    (stop,) = stops
    assert not stop.done and "refused 5 times" in stop.reason and "canary differs" in stop.reason
    hand.tell(ev.Resumed(hand.params))
    assert hand.state.stopped is None


def test_a_version_that_somebody_holds_may_be_refused_by_others() -> None:
    hand = Hand(batch_groups=8, group_size=1, num_steps=3, load_failures_max=2, attempts_max=2)
    hand.begin({"a": 4})
    hand.join("b", 4)
    for _ in range(6):
        inst = hand.state.instances.get("b")
        if inst is None:
            hand.join("b", 4)
        elif inst.loading is not None:
            hand.tell(ev.LoadFailed("b", 0, "canary differs"))
    assert hand.state.stopped is None
