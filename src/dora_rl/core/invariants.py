"""Recount everything and compare: the conservation laws of the core's state, for tests and soak.

O(everything) on purpose. The cheap half (the bound at every take and step boundary, nothing
unloaded while busy, nothing retired while active) is asserted by the handlers at run time.
"""

from __future__ import annotations

from collections import Counter

from dora_rl.core.state import GENERATING, GroupPhase, Phase, State
from dora_rl.types import InstanceId, RequestId, Version


def check_invariants(state: State) -> None:
    """Raise AssertionError at the first law that does not hold."""
    _check_groups(state)
    _check_requests(state)
    _check_instances(state)
    if state.policy.keeps_bound and state.target is None:
        bound, untaken = state.bound, state.untaken
        assert bound.holds(untaken), f"staleness bound broken: {bound} with {untaken}"


def _check_groups(state: State) -> None:
    assert state.num_issued == len(state.groups) + sum(state.num_ended.values()), "groups leak"
    untaken: Counter[Version] = Counter()
    unended: Counter[Version] = Counter()
    inflight = ready = 0
    for group in state.groups.values():
        unended[group.version] += 1
        taken = group.phase is GroupPhase.TRAINING
        assert taken == (group.step is not None)
        untaken[group.version] += not taken
        ready += group.phase is GroupPhase.READY
        inflight += group.phase not in (GroupPhase.READY, GroupPhase.TRAINING)
        phases = Counter(r.phase for r in group.requests)
        assert group.num_scored == phases[Phase.SCORED]
        assert group.num_failed == phases[Phase.FAILED]
        assert group.num_generating == sum(phases[p] for p in GENERATING)
    assert (inflight, ready) == (state.num_inflight, state.num_ready)
    for version, live in state.versions.items():
        assert live.untaken == untaken[version] and live.unended == unended[version]
        for gid in live.ready:
            assert state.groups[gid].phase is GroupPhase.READY
    taken_ids = [gid for batch in state.batches.values() for gid in batch.groups]
    assert len(taken_ids) == len(set(taken_ids)), "a group is in two places of a batch"
    assert len(taken_ids) == sum(g.step is not None for g in state.groups.values())
    assert len(state.batch.groups) <= state.params.batch_groups


def _check_requests(state: State) -> None:
    active: Counter[Version] = Counter()
    pending: Counter[Version] = Counter()
    for group in state.groups.values():
        for request in group.requests:
            if request.phase not in GENERATING:
                continue
            active[request.version] += 1
            pending[request.version] += request.phase is Phase.PENDING
            home = state.instances.get(request.instance or "")
            if request.phase is Phase.RUNNING:
                assert home is not None and request.id in home.requests
                assert request.version in home.held, "a request runs without its weights"
                assert request.version not in home.leaving, "a request runs where its version goes"
                awake = home.awake or home.id in state.drowsy
                assert awake, "a request runs on a sleeping instance"
                tried = home.isolating == request.version
                tried = tried and (not request.crowd or home.load <= request.crowd)
                # One that is about to sleep is emptied as events have room; nobody joins it there.
                tried = tried or home.id in state.drowsy
                assert tried or not request.suspect, "a suspect runs among others"
            elif request.phase is Phase.MOVING:
                dst = state.instances.get(request.dest or "")
                assert home is not None and dst is not None and request.id in dst.incoming
                assert request.id in home.requests or request.id in home.parked
            elif request.instance is not None:
                assert home is not None and request.id in home.parked
            else:
                live = state.versions[request.version]
                assert request.id in (live.suspects if request.suspect else live.pending)
    assert state.num_active == sum(active.values())
    for version, live in state.versions.items():
        assert live.num_active == active[version] and live.num_pending == pending[version]


def _check_instances(state: State) -> None:
    slots = 0
    seen: dict[RequestId, InstanceId] = {}
    for inst in state.instances.values():
        slots += inst.slots_max if inst.awake else 0
        assert inst.load <= inst.slots_max, f"{inst.id} has more requests than slots"
        assert len(inst.held) + (inst.loading is not None) <= inst.resident_max
        for rid in [*inst.requests, *inst.parked]:
            assert rid not in seen, f"{rid} is on {inst.id} and on {seen[rid]}"
            seen[rid] = inst.id
        for version, held in inst.held.items():
            requests = [state.request(r) for r in inst.requests]
            here = [r for r in requests if r is not None and r.version == version]
            running = [r for r in here if r.phase is Phase.RUNNING]
            assert held.num == len(running) and held.outgoing == len(here) - len(running)
            assert held.offset == sum(r.base_tokens - r.mark for r in running)
            live = state.versions.get(version)
            assert live is not None, f"{inst.id} holds version {version}, which is retired"
            assert (inst.id in live.holders) == (version not in inst.leaving)
            assert (inst.id in live.leavers) == (version in inst.leaving)
        assert inst.leaving.keys() <= inst.held.keys(), f"{inst.id} leaves what it does not hold"
    assert slots == state.slots_awake
    asleep = {inst.id for inst in state.instances.values() if not inst.awake}
    assert state.drowsy.keys() | state.waking.keys() <= asleep
    assert state.num_elastic == sum(inst.elastic for inst in state.instances.values())
    for inst in state.instances.values():
        if inst.isolating is not None:
            assert state.versions[inst.isolating].isolation == inst.id
    for live in state.versions.values():
        if live.isolation is not None:
            assert state.instances[live.isolation].isolating == live.version
        for name in [*live.holders, *live.leavers]:
            assert live.version in state.instances[name].held
        for name in live.coming:
            inst = state.instances[name]
            assert live.version in inst.wants or live.version == inst.loading
