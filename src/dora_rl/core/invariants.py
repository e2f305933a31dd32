"""Recount everything and compare: the conservation laws of the core's state, for tests and soak.

O(everything) on purpose. The cheap half (the bound at every take and step boundary, nothing
unloaded while busy, nothing retired while active) is asserted by the handlers at run time.
"""

from __future__ import annotations

from collections import Counter

from dora_rl.core.state import GENERATING, GroupPhase, Instance, Phase, Request, State
from dora_rl.types import Version


def check_invariants(state: State) -> None:
    """Raise AssertionError at the first law that does not hold."""
    _check_groups(state)
    _check_pools(state)
    _check_requests(state)
    _check_instances(state)
    if state.policy.keeps_bound and state.target is None:
        bound, untaken = state.bound, state.untaken
        assert bound.holds(untaken), f"staleness bound broken: {bound} with {untaken}"


def _check_groups(state: State) -> None:
    assert state.next_group == len(state.groups) + sum(state.num_ended.values()), "groups leak"
    groups = state.groups.values()
    for group in groups:
        assert (group.phase is GroupPhase.TRAINING) == (group.step is not None)
        phases = Counter(r.phase for r in group.requests)
        assert group.num_scored == phases[Phase.SCORED]
        assert group.num_failed == phases[Phase.FAILED]
    phases = Counter(group.phase for group in groups)
    taken = phases[GroupPhase.TRAINING]
    assert state.num_ready == phases[GroupPhase.READY]
    assert state.num_inflight == len(groups) - state.num_ready - taken
    unended = Counter(group.version for group in groups)
    untaken = Counter(group.version for group in groups if group.step is None)
    for version, live in state.versions.items():
        assert live.untaken == untaken[version] and live.unended == unended[version]
        assert all(state.groups[gid].phase is GroupPhase.READY for gid in live.ready)
    taken_ids = [gid for batch in state.batches.values() for gid in batch.groups]
    assert len(taken_ids) == len(set(taken_ids)), "a group is in two places of a batch"
    assert len(taken_ids) == taken
    assert len(state.batch.groups) <= state.params.batch_groups


def _check_pools(state: State) -> None:
    num_pools, pools = state.params.pools, state.curriculum.pools
    assert num_pools or not pools, "pools without a curriculum"
    assert all(0 <= number < num_pools for number in pools)
    for pool in pools.values():
        assert 0 <= pool.told <= 1 and 0 <= pool.credit < 1
    if num_pools:
        assert sum(pool.issued for pool in pools.values()) == state.next_prompt, "prompts leak"


def _check_requests(state: State) -> None:
    generating = [r for g in state.groups.values() for r in g.requests if r.phase in GENERATING]
    for request in generating:
        _check_place(state, request)
    active = Counter(request.version for request in generating)
    pending = Counter(r.version for r in generating if r.phase is Phase.PENDING)
    assert state.num_active == len(generating)
    for version, live in state.versions.items():
        assert live.num_active == active[version] and live.num_pending == pending[version]


def _check_place(state: State, request: Request) -> None:
    home = state.instances.get(request.instance or "")
    if request.phase is Phase.RUNNING:
        assert home is not None and request.id in home.requests
        assert request.version in home.held, "a request runs without its weights"
        assert request.version not in home.leaving, "a request runs where its version goes"
        # One that is about to sleep is drained as events have room; nobody joins it there.
        drained = home.id in state.to_sleep
        assert home.awake or drained, "a request runs on a sleeping instance"
        tried = home.isolating == request.version
        tried = tried and (not request.crowd or home.load <= request.crowd)
        assert tried or drained or not request.suspect, "a suspect runs among others"
    elif request.phase is Phase.MOVING:
        dst = state.instances.get(request.dest or "")
        assert home is not None and dst is not None and request.id in dst.incoming
        assert request.id in home.requests or request.id in home.parked
    elif request.instance is not None:
        assert home is not None and request.id in home.parked
    else:
        live = state.versions[request.version]
        assert request.id in (live.suspects if request.suspect else live.pending)


def _check_instances(state: State) -> None:
    instances = state.instances.values()
    places = Counter(rid for inst in instances for rid in [*inst.requests, *inst.parked])
    twice = [rid for rid, count in places.items() if count > 1]
    assert not twice, f"{twice} are on two instances"
    for inst in instances:
        assert inst.load <= inst.slots_max, f"{inst.id} has more requests than slots"
        assert len(inst.held) + (inst.loading is not None) <= inst.resident_max
        for version in inst.held:
            _check_held(state, inst, version)
        assert inst.leaving.keys() <= inst.held.keys(), f"{inst.id} leaves what it does not hold"
        if inst.isolating is not None:
            assert state.versions[inst.isolating].isolation == inst.id
    assert state.slots_awake == sum(inst.slots_max for inst in instances if inst.awake)
    assert state.to_sleep.keys() | state.to_wake.keys() <= {
        inst.id for inst in instances if not inst.awake
    }
    assert state.num_elastic == sum(inst.elastic for inst in instances)
    for live in state.versions.values():
        if live.isolation is not None:
            assert state.instances[live.isolation].isolating == live.version
        for name in [*live.holders, *live.leavers]:
            assert live.version in state.instances[name].held
        for name in live.coming:
            inst = state.instances[name]
            assert live.version in inst.load_queue or live.version == inst.loading


def _check_held(state: State, inst: Instance, version: Version) -> None:
    held, live = inst.held[version], state.versions.get(version)
    found = [state.request(rid) for rid in inst.requests]
    here = [request for request in found if request is not None and request.version == version]
    running = [request for request in here if request.phase is Phase.RUNNING]
    assert held.num == len(running) and held.outgoing == len(here) - len(running)
    assert held.offset == sum(request.base_tokens - request.mark for request in running)
    assert live is not None, f"{inst.id} holds version {version}, which is retired"
    assert (inst.id in live.holders) == (version not in inst.leaving)
    assert (inst.id in live.leavers) == (version in inst.leaving)
