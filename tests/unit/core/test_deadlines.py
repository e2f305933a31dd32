"""Open waits keep their deadline, met ones are forgotten."""

from __future__ import annotations

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core import waits
from dora_rl.core.params import Deadlines
from dora_rl.types import RequestId
from tests.kit.hand_driven import Hand, only


def test_deadlines_that_were_met_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward may take an hour; an hour of answered questions is not kept."""
    monkeypatch.setattr(waits, "DEADLINES_MIN", 8)
    patient = Deadlines(report_s=1e9, load_s=1e9, trainer_s=1e9, score_s=3600.0)
    hand = Hand(
        batch_groups=1,
        group_size=2,
        num_steps=60,
        max_staleness=50,
        inflight_groups=4,
        deadlines=patient,
    )
    hand.begin({"a": 16}, resident_max=60)
    hand.finish(0)  # the one score that nobody tells
    for _ in range(40):
        hand.settle()
        hand.complete(next(group.id for group in hand.running() if group.id))
        hand.train()
        hand.tell(ev.Tick(), after_s=1.0)
        in_flight = 2 * len(hand.state.groups) + 2 * len(hand.state.instances)
        assert len(hand.state.deadlines) <= 8 + 2 * in_flight
    assert hand.request(0).score_attempts == 0
    actions = hand.tell(ev.Tick(), after_s=3600.0)
    assert RequestId(0, 0) in [score.request for score in only(actions, act.Score)]
    assert hand.request(0).score_attempts == 1
