"""The controller comes back from its log: same groups, maybe another K, B or number of steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.observe.eventlog import Entry, encode_entry, encode_snapshot, recover_lines
from dora_rl.types import Mode, RequestId, UserError
from tests.kit.hand_driven import Hand, only


def resumed(hand: Hand, **changes: int) -> list[act.Action]:
    """Everything died; the controller is back with a learner and one instance."""
    actions = hand.tell(ev.Resumed(replace(hand.params, **changes)))
    version = hand.state.committed
    actions += hand.tell(ev.LearnerJoined(version, version))
    actions += hand.join("a", 64, resident_max=9, versions=tuple(hand.state.versions))
    return actions


def test_a_resumed_run_goes_on_with_the_same_groups() -> None:
    hand = Hand(batch_groups=3, group_size=2, num_steps=3)
    hand.begin({"a": 64})
    hand.complete(1)
    hand.finish(0, 0)
    before = {g.id: (g.prompt, g.version) for g in hand.state.groups.values()}
    actions = resumed(hand)
    assert {g.id: (g.prompt, g.version) for g in hand.state.groups.values()} == before
    assert not only(actions, act.EndGroup)
    assert only(actions, act.Score) == [act.Score(RequestId(0, 0), 0, 1)]
    assert all(d.resume for d in only(actions, act.Dispatch) if d.group in before)
    hand.to_the_end()
    hand.audit()


def test_a_resume_is_no_failure_of_a_score() -> None:
    hand = Hand(batch_groups=3, group_size=2, num_steps=3, attempts_max=2)
    hand.begin({"a": 64})
    hand.finish(0, 0)
    for question in range(1, 6):
        asked = only(resumed(hand), act.Score)
        assert asked == [act.Score(RequestId(0, 0), 0, question)]
    assert hand.request(0).score_failures == 0
    hand.tell(ev.ScoreFailed(RequestId(0, 0), 5, "raised ValueError"))
    assert 0 in hand.state.groups, "its first failure of two"
    hand.to_the_end()
    hand.audit()


@pytest.mark.parametrize("changes", [{"max_staleness": 0}, {"batch_groups": 1}])
def test_a_stricter_k_or_b_waits_until_the_bound_holds_under_it(changes: dict[str, int]) -> None:
    hand = Hand(batch_groups=3, group_size=1, num_steps=8, max_staleness=2)
    hand.begin({"a": 64})
    for group in range(4):
        hand.complete(group)
    hand.train()
    outstanding = set(hand.state.groups)
    actions = resumed(hand, **changes)
    assert hand.state.target is not None and not only(actions, act.InForce)
    assert not only(actions, act.IssueGroup), "admission pauses"
    hand.to_the_end()
    assert hand.state.target is None
    trained = {g for e in hand.entries for a in only(e.actions, act.CloseStep) for g in a.groups}
    assert outstanding <= trained, "nothing was dropped for the change"
    hand.audit()


@pytest.mark.parametrize("changes", [{"max_staleness": 4}, {"batch_groups": 5}])
def test_a_looser_k_or_b_is_in_force_at_once(changes: dict[str, int]) -> None:
    hand = Hand(batch_groups=3, group_size=1, num_steps=8, max_staleness=2)
    hand.begin({"a": 64})
    hand.complete(0)
    actions = resumed(hand, **changes)
    (force,) = only(actions, act.InForce)
    assert (force.max_staleness, force.batch_groups) == (
        changes.get("max_staleness", 2),
        changes.get("batch_groups", 3),
    )
    assert only(actions, act.IssueGroup)
    hand.to_the_end()
    hand.audit()


def test_a_smaller_k_does_not_cover_groups_the_step_took_before() -> None:
    """Step 2 took a group of version 0 under K = 2; K = 1 comes into force in a later step."""
    hand = Hand(batch_groups=2, group_size=1, num_steps=6, max_staleness=2)
    hand.begin({"a": 64})
    assert set(range(6)) == {g.id for g in hand.running() if g.version == 0}
    for group in (0, 1):
        hand.complete(group)
    hand.train()
    for group in (2, 3):
        hand.complete(group)
    hand.train()
    hand.complete(4)  # version 0 in step 2
    assert hand.state.filling == 2 and hand.state.batch.groups == [4]
    resumed(hand, max_staleness=1)
    hand.to_the_end()
    hand.audit()
    forces = [a for e in hand.entries for a in only(e.actions, act.InForce)]
    assert [f.max_staleness for f in forces] == [2, 1] and forces[1].step > 2


def test_fewer_steps_than_the_outstanding_groups_need_are_refused_or_waited_for() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=6, max_staleness=3)
    hand.begin({"a": 64})
    hand.complete(0)
    hand.complete(1)
    hand.train()
    assert len(hand.state.groups) == 8, "four more steps are needed to train them"
    try:
        resumed(hand, num_steps=3)
    except UserError:
        return
    hand.to_the_end()
    hand.audit()


@pytest.mark.parametrize(("batch", "staleness"), [(2, 0), (8, 2)])
def test_a_closed_batch_keeps_its_updates_when_b_changes(batch: int, staleness: int) -> None:
    """Step 0 was closed with B = 4 and two updates, then everything died."""
    hand = Hand(
        batch_groups=4, updates_per_step=2, group_size=1, num_steps=6, max_staleness=staleness
    )
    hand.begin({"a": 64})
    for group in range(4):
        hand.complete(group)
    hand.tell(ev.BatchAccepted(0))
    fed = only(resumed(hand, batch_groups=batch), act.Feed)
    assert [f.update for f in fed if f.step == 0] == [0, 0, 1, 1]


def test_a_step_that_was_partly_fed_ahead_is_cut_anew_when_b_changes() -> None:
    """Three groups of step 1 were fed under B = 4 and two updates; it is closed with B = 6."""
    hand = Hand(batch_groups=4, updates_per_step=2, group_size=1, num_steps=6, max_staleness=3)
    hand.begin({"a": 64})
    for group in range(4):
        hand.complete(group)
    hand.tell(ev.BatchAccepted(0))
    fed = [f for g in (4, 5, 6) for f in only(hand.complete(g), act.Feed)]
    assert [(f.step, f.update) for f in fed] == [(1, 0), (1, 0), (1, 1)]
    fed = only(resumed(hand, batch_groups=6), act.Feed)
    assert [f.update for f in fed if f.step == 1] == [0, 0, 0]
    hand.to_the_end()
    hand.audit()


def test_more_steps_may_be_asked_for_after_the_end() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=2)
    hand.begin({"a": 8})
    hand.to_the_end()
    resumed(hand, num_steps=4)
    hand.to_the_end()
    assert hand.state.committed == 4
    hand.audit()


def test_another_mode_is_refused() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=3)
    hand.begin({"a": 8})
    with pytest.raises(UserError, match="this run is multi_version"):
        hand.tell(ev.Resumed(replace(hand.params, mode=Mode.SYNC)))


def test_a_run_that_has_ended_needs_no_step_more_than_it_has() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=3)
    hand.begin({"a": 64})
    hand.to_the_end()
    with pytest.raises(UserError, match="need 3 steps"):
        resumed(hand, num_steps=2)


class Recovering(Hand):
    """After every event the run could come back from a snapshot of it: it does, beside this one."""

    def tell(self, event: ev.Event, *, after_s: float = 0.0) -> list[act.Action]:
        now = self.now + after_s
        snapshot = encode_snapshot(len(self.entries), now, self.state)
        actions = super().tell(event, after_s=after_s)
        entry = Entry(len(self.entries) - 1, now, event, actions)
        recover_lines([snapshot, encode_entry(entry)])  # refuses other actions than these
        return actions


def changed_params(params: Params) -> Iterator[tuple[str, Params]]:
    """One changed field after the other, those of nested figures too."""
    for name, value in _changed(params):
        yield name, replace(params, **{name.partition(".")[0]: value})


def _changed(figures: Any) -> Iterator[tuple[str, Any]]:
    special = {"mode": Mode.SYNC, "kv_low": 0.7, "kv_high": 0.9, "samples_min": 1}
    for field in fields(figures):
        value = getattr(figures, field.name)
        if is_dataclass(value):
            for name, inner in _changed(value):
                yield f"{field.name}.{name}", replace(value, **{name: inner})  # pyright: ignore
        elif field.name in special:
            yield field.name, special[field.name]
        else:
            yield field.name, not value if isinstance(value, bool) else value * 2


@pytest.mark.parametrize("mode", [Mode.MULTI_VERSION, Mode.REPLICATION, Mode.PARTIAL])
def test_whatever_changes_on_resume_a_later_resume_finds_the_same_run(mode: Mode) -> None:
    """A snapshot holds the params and nothing that follows from them."""
    first = Hand(mode=mode, batch_groups=4, group_size=2, num_steps=3, inflight_groups=9).params
    for name, params in changed_params(first):
        hand = Recovering(mode=mode, batch_groups=4, group_size=2, num_steps=3, inflight_groups=9)
        hand.begin({"a": 6, "b": 9}, resident_max=2)
        hand.complete(0)
        if name in ("mode", "group_size"):
            with pytest.raises(UserError, match=name):
                hand.tell(ev.Resumed(params))
            continue
        hand.tell(ev.Resumed(params))
        hand.tell(ev.LearnerJoined(0, 0))
        hand.join("a", 16, resident_max=2, versions=(0,))
        hand.to_the_end()
        assert hand.state.params == params, f"{name} did not come into force"
        hand.audit()
