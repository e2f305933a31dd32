"""Everything that is written down can be read back, and a restored state decides the same."""

from __future__ import annotations

import json
import math
import typing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora_rl.core import events as ev
from dora_rl.core.actions import Action
from dora_rl.core.events import Event, Scored, Started
from dora_rl.core.invariants import check_invariants
from dora_rl.core.params import Params
from dora_rl.core.state import State
from dora_rl.core.step import step
from dora_rl.io.codec import decode, dumps, encode, loads
from dora_rl.observe.eventlog import MemoryLog
from dora_rl.sim.presets import PRESETS, world_spec
from dora_rl.sim.world import World
from dora_rl.types import Mode, RequestId
from tests.kit.hand_driven import Hand

st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(RequestId, st.builds(RequestId, st.integers(), st.integers()))


def through_json(kind: Any, value: Any) -> Any:
    """By our own text; and the text of releases that used `json` alone says the same."""
    written = encode(kind, value)
    text, plain = dumps(written), json.dumps(written)
    assert text.isascii() and str(json.loads(text)) == str(json.loads(plain))
    assert str(loads(plain.encode())) == str(loads(text)) == str(json.loads(plain))
    return decode(kind, loads(text))


@pytest.mark.parametrize("kind", typing.get_args(Event), ids=lambda k: k.__name__)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_event_comes_back_from_json(kind: type, data: st.DataObject) -> None:
    event = data.draw(st.from_type(kind))
    assert through_json(Event, event) == event


@pytest.mark.parametrize("kind", typing.get_args(Action), ids=lambda k: k.__name__)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_action_comes_back_from_json(kind: type, data: st.DataObject) -> None:
    action = data.draw(st.from_type(kind))
    back = through_json(Action, action)
    assert back == action and type(back) is type(action)


def test_a_reward_that_is_no_number_survives_too() -> None:
    back = through_json(Event, Scored(RequestId(1, 2), 0, float("nan")))
    assert math.isnan(back.reward)


def test_a_field_that_an_older_log_does_not_have_gets_its_default() -> None:
    written = encode(Params, Params())
    del written["flip_gain_min"]
    assert decode(Params, written) == Params()


def test_a_log_of_an_older_release_is_decided_by_its_own_rules() -> None:
    """Its parameters do not name what came later, and its snapshots do not hold it."""
    newer = ("losses_max", "group_failures_max", "trainer_losses_max", "instance_losses_max")
    written = encode(Params, Params(losses_max=2, group_failures_max=4, trainer_losses_max=3))
    written["deadlines"].pop("progress_s")
    for name in (*newer, "load_failures_max", "clear_tokens"):
        written.pop(name)
    params = decode(Params, written)
    assert [getattr(params, name) for name in newer] == [0, 0, 0, 0]
    assert params.deadlines.progress_s == 0.0
    hand = Hand(batch_groups=2, group_size=2, num_steps=5)
    hand.begin({"a": 4})
    old = encode(State, hand.state)
    for name in ("failures", "set_aside", "failed_prompts", "judged_prompts", "reissued_last"):
        old.pop(name)
    for name in ("learner_losses", "instance_losses", "losses_among", "scored_s"):
        old.pop(name)
    for _, live in old["versions"]:
        for name in ("suspects", "isolation", "load_failures"):
            live.pop(name)
    for inst in old["instances"].values():
        for name in ("progress_s", "still", "isolating"):
            inst.pop(name)
    for _, group in old["groups"]:
        for request in group["requests"]:
            for name in ("kept", "losses", "alone_losses", "clearings", "suspect", "lost_on"):
                request.pop(name)
            request.pop("score_failures")
            request.pop("crowd")
    restored = through_json(State, hand.state)
    assert encode(State, decode(State, old)) == encode(State, restored)


def test_a_value_without_a_rule_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="unsupported"):
        encode(object, object())


@pytest.mark.parametrize("mode", list(Mode))
def test_a_restored_state_is_the_same_and_goes_on_the_same(mode: Mode) -> None:
    """Restore at several places of a run, then feed both states the rest of it."""
    world = World(world_spec(PRESETS["small"], mode, seed=3), log=MemoryLog())
    world.start()
    assert world.run(1e6)
    entries = world.log.entries  # type: ignore[attr-defined]
    assert isinstance(entries[0].event, Started)
    state = State(entries[0].event.params)
    shadows: list[State] = []
    for place, entry in enumerate(entries):
        if place % (len(entries) // 3) == 10:
            shadow = through_json(State, state)
            check_invariants(shadow)
            assert encode(State, shadow) == encode(State, state)
            shadows.append(shadow)
        actions = step(state, entry.event, entry.now)
        assert actions == entry.actions
        for shadow in shadows:
            assert step(shadow, entry.event, entry.now) == actions
    assert len(shadows) >= 3
    for shadow in shadows:
        assert encode(State, shadow) == encode(State, state)


def test_a_state_in_trouble_comes_back_too() -> None:
    """Parked requests, moves under way, a load that failed, a change of K asked for."""
    hand = Hand(batch_groups=2, group_size=2, num_steps=5, max_staleness=2)
    hand.begin({"a": 4, "b": 4}, kv_tokens_max=1_000)
    hand.tell(ev.InstanceReport("a", 600, 990))
    hand.tell(ev.InstanceLost("b", "died"))
    hand.tell(ev.Resumed(replace(hand.params, max_staleness=0)))
    hand.join("c", 4)
    assert hand.state.target is not None
    assert encode(State, through_json(State, hand.state)) == encode(State, hand.state)
