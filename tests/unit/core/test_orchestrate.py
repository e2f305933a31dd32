"""Which instance holds which version: flips, donors, seats, retirement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import MoveCost, Params
from dora_rl.core.placement import cheaper_way
from dora_rl.core.state import Phase
from tests.kit.hand_driven import Hand, only


def two_versions(slots: int, names: str, **params: Any) -> Hand:
    """Version 1 is published while four groups of version 0 run on."""
    defaults = {"batch_groups": 4, "group_size": 1, "num_steps": 6, "max_staleness": 3}
    hand = Hand(**(defaults | {"inflight_groups": 8} | params))
    hand.begin(dict.fromkeys(names, slots))
    for group in range(4):
        hand.complete(group)
    hand.train()
    return hand


def holders(hand: Hand) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for inst in hand.state.instances.values():
        for version in [*inst.held, *([inst.loading] if inst.loading is not None else [])]:
            found.setdefault(version, set()).add(inst.id)
    return found


def test_a_new_version_is_loaded_where_it_is_needed_and_the_rest_goes_on() -> None:
    hand = two_versions(4, "abcd")
    for group in list(hand.state.groups)[:4]:
        hand.complete(group)
    hand.settle()
    demand = {v: live.num_active for v, live in hand.state.versions.items()}
    assert demand == {0: 4, 1: 4}
    assert {v: len(names) for v, names in holders(hand).items()} == {0: 3, 1: 1}, "one flip"
    assert all(r.phase is Phase.RUNNING for g in hand.running() for r in g.requests)
    hand.to_the_end()
    hand.audit()


def test_instances_are_shared_out_in_proportion_when_requests_wait() -> None:
    """Two slots each: four requests of version 1 need two instances."""
    hand = two_versions(2, "abcd")
    for group in list(hand.state.groups)[:4]:
        hand.complete(group)
    hand.settle()
    hand.tell(ev.Tick(), after_s=31)
    hand.settle()
    assert {v: live.num_active for v, live in hand.state.versions.items()} == {0: 4, 1: 4}
    assert {v: len(names) for v, names in holders(hand).items()} == {0: 2, 1: 2}
    assert all(r.phase is Phase.RUNNING for g in hand.running() for r in g.requests)
    hand.to_the_end()
    hand.audit()


def test_an_idle_instance_gets_the_newest_version() -> None:
    hand = two_versions(8, "a")
    actions = hand.join("b", 8)
    assert only(actions, act.Load) == [act.Load("b", 1, None)]


def test_weights_come_from_the_least_loaded_peer_that_has_them() -> None:
    hand = Hand(batch_groups=4, group_size=1, num_steps=2, max_staleness=0)
    hand.begin({"a": 2, "b": 8})
    assert hand.state.instances["a"].load == 1 and hand.state.instances["b"].load == 3
    actions = hand.join("c", 8)
    assert only(actions, act.Load) == [act.Load("c", 0, "b")], "3 of 8 slots, not 1 of 2"


def test_idle_instances_do_not_change_their_version_back_and_forth() -> None:
    """One long request of version 0 runs on one instance; the other two have nothing to do."""
    hand = Hand(batch_groups=2, group_size=1, num_steps=6, max_staleness=3, inflight_groups=1)
    hand.begin({"a": 4, "b": 4, "c": 4})
    hand.complete(0)
    hand.complete(1)
    hand.train()
    hand.settle()
    loads: list[act.Action] = []
    for _ in range(5):
        actions = hand.tell(ev.Tick(), after_s=31)
        for name in "abc":
            actions += hand.tell(ev.InstanceReport(name, 0, 0))
        loads += only(actions + hand.settle(), act.Load)
    assert len(loads) <= 2


def test_an_instance_with_several_seats_needs_no_flip() -> None:
    hand = Hand(batch_groups=4, group_size=1, num_steps=6, max_staleness=2, inflight_groups=8)
    hand.begin({"a": 8}, resident_max=3)
    for group in range(4):
        hand.complete(group)
    actions = hand.train() + hand.load_all()
    assert only(actions, act.Load) == [act.Load("a", 1, None)]
    assert not only(actions, (act.Unload, act.Move, act.Park))  # type: ignore[arg-type]
    assert set(hand.state.instances["a"].held) == {0, 1}
    hand.to_the_end()
    hand.audit()


def test_when_versions_outnumber_instances_the_old_ones_come_first_and_all_end() -> None:
    """One instance, one seat, K = 2: version 1 waits until version 0 has ended."""
    hand = Hand(batch_groups=2, group_size=1, num_steps=5, max_staleness=2, inflight_groups=4)
    hand.begin({"a": 4})
    for group in (0, 1):
        hand.complete(group)
    hand.train()
    assert holders(hand) == {0: {"a"}} and hand.state.versions[0].num_active
    hand.to_the_end()
    hand.audit()


def test_a_version_retires_with_the_step_of_its_last_group_and_is_unloaded() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=4, max_staleness=1, inflight_groups=2)
    hand.begin({"a": 4, "b": 4})
    hand.complete(0)
    hand.complete(1)
    actions = hand.train()
    outstanding = {g.version for g in hand.state.groups.values()}
    assert outstanding == {0}, "filled while step 0 trained"
    assert not only(actions, act.RetireVersion)
    for group in list(hand.state.groups):
        hand.complete(group)
    actions = hand.train()
    assert act.RetireVersion(0) in actions and 0 not in holders(hand)
    hand.to_the_end()
    hand.audit()


def test_without_repartition_only_a_version_without_an_instance_gets_one() -> None:
    hand = two_versions(4, "abcd", repartition=False)
    for group in list(hand.state.groups)[:4]:
        hand.complete(group)
    hand.settle()
    assert {v: len(names) for v, names in holders(hand).items()} == {0: 3, 1: 1}
    hand.to_the_end()
    hand.audit()


def test_a_slow_instance_gets_less() -> None:
    hand = Hand(batch_groups=8, group_size=1, num_steps=2, max_staleness=0)
    hand.tell(ev.Started(hand.params))
    hand.join("a", 8, versions=(0,))
    hand.join("b", 8, versions=(0,))
    hand.tell(ev.InstanceReport("b", 0, 0, speed=0.25))
    hand.tell(ev.LearnerJoined(0, 0))
    assert len(hand.state.instances["a"].requests) > 2 * len(hand.state.instances["b"].requests)


def test_levelling_takes_running_requests_over_from_the_donor() -> None:
    hand = Hand(
        batch_groups=8,
        group_size=1,
        num_steps=3,
        max_staleness=1,
        inflight_groups=8,
        level_running=True,
        level_slack=0.0,
    )
    hand.begin({"a": 8})
    actions = hand.join("b", 8) + hand.load_all()
    moves = only(actions, act.Move)
    assert len(moves) == 4 and {(m.src, m.dst) for m in moves} == {("a", "b")}
    for move in moves:
        hand.tell(ev.Moved(move.request, move.epoch, "a", "b", 1, 1))
    assert len(hand.state.instances["a"].requests) == len(hand.state.instances["b"].requests)
    hand.to_the_end()
    hand.audit()


def test_the_way_of_a_move_is_chosen_by_estimated_time() -> None:
    params = Params(cost=MoveCost(1e5, 1e9, 0.5, 1e4))
    # Moving costs 0.5 s plus 0.1 ms a token, prefilling 0.1 ms a token.
    assert cheaper_way(params, 1_000) is act.How.PREFILL
    fast = replace(params, cost=MoveCost(1e5, 1e10, 0.5, 1e4))
    # Moving costs 0.5 s plus 0.01 ms a token: worth it from about 5,600 tokens on.
    assert cheaper_way(fast, 5_000) is act.How.PREFILL
    assert cheaper_way(fast, 6_000) is act.How.KV
    assert cheaper_way(replace(fast, kv_moves=False), 6_000) is act.How.PREFILL
