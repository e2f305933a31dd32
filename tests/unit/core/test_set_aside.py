"""Prompts whose groups fail: issued again in turn, set aside in the end, and counted once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.state import Phase, State
from dora_rl.io.codec import decode, encode
from dora_rl.types import RequestId
from tests.kit.hand_driven import Hand, only

ATTEMPTS = 3
BAD = 1  # the place of the poison in the stream


def working(**params: Any) -> Hand:
    rules = {"losses_max": 2, "group_failures_max": ATTEMPTS, "attempts_max": ATTEMPTS}
    sizes = {"batch_groups": 4, "group_size": 2, "num_steps": 8, "inflight_groups": 4}
    hand = Hand(**(rules | sizes | params))
    hand.begin({"a": 16})
    return hand


def fail_group(hand: Hand, group: int) -> list[act.Action]:
    """The reward of every sample raises until the group has failed."""
    said: list[act.Action] = []
    for sample in range(hand.params.group_size):
        for _ in range(hand.params.attempts_max):
            request = hand.state.request(RequestId(group, sample))
            if request is None:
                return said
            if request.phase is Phase.RUNNING:
                said += hand.finish(group, sample)
            attempt = request.score_attempts
            said += hand.tell(ev.ScoreFailed(request.id, attempt, "raised KeyError: 'answer'"))
    return said


def run_on(hand: Hand, bad: set[int]) -> list[act.Action]:
    """Everything succeeds, but the groups of bad prompts."""
    said: list[act.Action] = []
    for _ in range(2_000):
        if hand.state.stopped is not None:
            return said
        said += hand.settle()
        for group in hand.running():
            if group.id not in hand.state.groups or hand.state.stopped is not None:
                continue
            if all(r.phase is Phase.PENDING for r in group.requests):
                continue
            failing = group.prompt in bad
            said += fail_group(hand, group.id) if failing else hand.complete(group.id)
        batch = hand.state.batches.get(hand.state.committed)
        if batch is not None and batch.close_sent and hand.state.stopped is None:
            said += hand.train()
        said += hand.tell(ev.Tick(), after_s=1.0)
        for inst in list(hand.state.instances):
            said += hand.tell(ev.InstanceReport(inst, 0, 0))
    raise AssertionError("the run does not end")


def test_a_prompt_whose_reward_always_raises_is_set_aside_and_the_run_goes_on() -> None:
    hand = working(failed_min=2)
    said = run_on(hand, {BAD})
    (aside,) = only(said, act.SetAside)
    assert (aside.prompt, aside.failures, aside.kills) == (BAD, ATTEMPTS, False)
    assert "KeyError" in aside.reason
    (stop,) = only(said, act.Stop)
    assert stop.done
    issued = [a for entry in hand.entries for a in only(entry.actions, act.IssueGroup)]
    assert len([a for a in issued if a.prompt == BAD]) == ATTEMPTS
    assert hand.state.set_aside == {BAD: aside.reason} and not hand.state.failures
    hand.audit()


def test_failed_prompts_come_back_in_turn_with_new_ones() -> None:
    """Never two of them without a new one in between."""
    hand = working(failed_share_max=1.0)
    run_on(hand, {0, 1, 2, 3})
    issued = [a for entry in hand.entries for a in only(entry.actions, act.IssueGroup)]
    seen: set[int] = set()
    again = [a.prompt in seen or bool(seen.add(a.prompt)) for a in issued]
    assert sum(again) == 4 * (ATTEMPTS - 1)
    assert not any(one and other for one, other in pairwise(again))
    hand.audit()


def test_the_repeats_of_a_few_bad_prompts_do_not_stop_a_run() -> None:
    """Five failed groups would be too many, three failed prompts are not: these count."""
    hand = working(failed_min=5, failed_share_max=0.15)
    ends = only(run_on(hand, {3, 12, 21}), act.EndGroup)
    failed = [e for e in ends if e.end is act.End.FAILED]
    assert len(failed) == 3 * ATTEMPTS > 0.15 * len(ends)
    assert hand.state.stopped == "all steps are trained"


def test_prompts_that_all_fail_stop_it_with_a_count_that_starts_anew_on_resume() -> None:
    hand = working(failed_min=6)
    said = run_on(hand, set(range(100)))
    (stop,) = only(said, act.Stop)
    assert not stop.done and "6 of 6 prompts failed" in stop.reason
    hand.tell(ev.Resumed(hand.params))
    hand.join("a", 16, versions=(0,))
    hand.tell(ev.LearnerJoined(0, 0))
    (stop,) = only(run_on(hand, {0}), act.Stop)  # its user has mended the reward
    assert stop.done
    hand.audit()


def test_a_prompt_that_succeeds_in_the_end_counts_as_good() -> None:
    hand = working(failed_min=2)
    fail_group(hand, 0)
    assert (hand.state.failed_prompts, hand.state.judged_prompts) == (1, 1)
    run_on(hand, set())
    assert hand.state.failed_prompts == 0 and not hand.state.failures


def test_failures_are_remembered_in_a_snapshot() -> None:
    hand = working()
    fail_group(hand, 1)
    fail_group(hand, next(g.id for g in hand.running() if g.prompt == 1))
    hand.state = decode(State, encode(State, hand.state))
    assert hand.state.failures == {1: 2}
    hand.complete(2)  # a new prompt has its turn, then this one
    group = next(g.id for g in hand.running() if g.prompt == 1)
    assert only(fail_group(hand, group), act.SetAside)
    hand.state = decode(State, encode(State, hand.state))
    assert list(hand.state.set_aside) == [1]


def test_the_audit_objects_to_a_prompt_that_is_set_aside_without_evidence() -> None:
    from dataclasses import replace

    from dora_rl.observe.audit import audit

    hand = working()
    run_on(hand, {BAD})

    def findings(change: Any) -> list[str]:
        entries = [
            replace(e, actions=[c for a in e.actions for c in change(a)]) for e in hand.entries
        ]
        return [f.message for f in audit(entries).findings]

    def swap(**fields: Any) -> Any:
        return lambda a: [replace(a, **fields) if isinstance(a, act.SetAside) else a]

    assert not findings(lambda a: [a])
    assert any("did not fail last" in f for f in findings(swap(prompt=2)))
    assert any("lost instances" in f for f in findings(swap(kills=True)))
    assert any("failed, not" in f for f in findings(swap(failures=ATTEMPTS + 1)))
    assert any("without a reason" in f for f in findings(swap(reason="")))
    early = act.SetAside(BAD, 1, 1, False, "too soon")

    def too_soon(action: act.Action) -> list[act.Action]:
        first = isinstance(action, act.EndGroup) and action.group == 1
        return [action, early] if first else [action]

    said = findings(too_soon)
    assert any(f"{ATTEMPTS} are needed" in f for f in said)
    assert any("after it was set aside" in f for f in said)
