"""The load-balancing orchestrator: which instance holds which version.

Triggers: a step's end (always), KV pressure, a period, an instance joining or leaving, a version
with requests and no instance, an instance with nothing to do. Between rebalances an event costs
O(live versions + log n); a rebalance looks at every instance once and flips as few as possible.
What it decides is begun by this event and the next ones: each causes `event_actions_max` actions.
In a large fleet the partition itself is decided by the event after the one that looked.

    want   the instance shall hold this version     leave  it shall give this version up
    pump   start the next load once a seat is free  stir   look at drained and idle instances
"""

from __future__ import annotations

from collections import deque

from dora_rl.core.actions import Action, Load, RetireVersion, Unload
from dora_rl.core.deadlines import watch_load
from dora_rl.core.partition import shares
from dora_rl.core.placement import (
    best_holder,
    kv_estimate,
    relocate,
    start_move,
    stop_isolating,
    touch,
)
from dora_rl.core.state import Held, Instance, Live, Phase, State
from dora_rl.types import Mode, Version

LOOKS_PER_ACTION = 10  # to look at so many instances takes as long as to cause an action


def want(state: State, inst: Instance, version: Version, now: float, out: list[Action]) -> None:
    """The instance shall hold this version as soon as it has a seat for it."""
    if version in inst.leaving:  # it is still here: it stays
        del inst.leaving[version]
        live = state.versions[version]
        del live.leavers[inst.id]
        live.holders[inst.id] = None
        touch(state, inst)
    if version in inst.held or version in inst.wants or inst.loading == version:
        return
    inst.wants.append(version)
    state.versions[version].coming[inst.id] = None
    pump(state, inst, now, out)


def leave(state: State, inst: Instance, version: Version, now: float, out: list[Action]) -> None:
    """Give a version up: no new requests, running ones go elsewhere, then the seat is free."""
    live = state.versions[version]
    inst.leaving[version] = None
    live.leavers[inst.id] = None
    live.holders.pop(inst.id, None)
    relocate(state, inst, version, now, out)


def pump(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    """Start the next wanted load if nothing is loading and a seat is (or can be made) free."""
    while inst.wants and (inst.wants[0] not in state.versions or inst.wants[0] in inst.held):
        _unwant(state, inst, inst.wants[0])
    if inst.loading is not None or not inst.wants or not inst.awake:
        return
    if len(inst.held) >= inst.resident_max:
        spare = _spare_seat(state, inst)
        if spare is None:
            return
        unload(state, inst, spare, out)
    version = inst.wants.pop(0)
    inst.loading = version
    inst.donor = _donor(state, state.versions[version], inst) if not inst.load_failures else None
    inst.num_loads += 1
    out.append(Load(inst.id, version, inst.donor, inst.num_loads))
    watch_load(state, inst, now)


def _unwant(state: State, inst: Instance, version: Version) -> None:
    inst.wants.remove(version)
    live = state.versions.get(version)
    if live is not None:
        live.coming.pop(inst.id, None)


def _spare_seat(state: State, inst: Instance) -> Version | None:
    """A resident version that can go: nothing of it is here, and nothing needs it here."""
    for version, held in inst.held.items():
        if held.busy:
            continue
        live = state.versions.get(version)
        if version in inst.leaving or live is None or not live.num_active:
            return version
        if len(live.holders) > 1:
            return version
    return None


def unload(state: State, inst: Instance, version: Version, out: list[Action]) -> None:
    assert not inst.held[version].busy, "a version was unloaded with requests on it"
    del inst.held[version]
    inst.leaving.pop(version, None)
    if inst.isolating == version:
        stop_isolating(state, inst)
    live = state.versions.get(version)
    if live is not None:
        live.holders.pop(inst.id, None)
        live.leavers.pop(inst.id, None)
    out.append(Unload(inst.id, version))


def _donor(state: State, live: Live, inst: Instance) -> str | None:
    """A peer that hands a request over if levelling is on, else the least loaded holder."""
    while state.params.level_running and live.donors:
        name = live.donors.pop()
        if name in live.holders:
            return name
    peer = best_holder(state, live)
    if peer is not None:
        return peer.id
    return next(iter(live.holders), None)


def on_loaded(
    state: State, inst: Instance, version: Version, now: float, out: list[Action]
) -> None:
    if inst.loading != version:
        return
    inst.loading = None
    inst.load_failures = 0
    live = state.versions.get(version)
    inst.held[version] = Held()
    if live is not None:
        live.load_failures = 0
    if live is None:  # retired while it was loading
        unload(state, inst, version, out)
    else:
        live.coming.pop(inst.id, None)
        live.holders[inst.id] = None
        touch(state, inst)
        if state.params.level_running and state.params.mode is not Mode.PARTIAL:
            _level(state, inst, live, now, out)
    pump(state, inst, now, out)


def _level(state: State, inst: Instance, live: Live, now: float, out: list[Action]) -> None:
    """Take running requests over from the donor until the two are level."""
    donor = state.instances.get(inst.donor or "")
    if donor is None or donor.id not in live.holders or live.num_pending or not inst.awake:
        return
    gap = donor.load - inst.load
    if gap <= state.params.level_slack * donor.slots_max:
        return
    movable = [r for r in map(state.request, donor.requests) if r is not None]
    movable = [r for r in movable if r.version == live.version and r.phase is Phase.RUNNING]
    movable.sort(key=lambda r: (state.length_of(r), r.id))
    for request in movable[: min(gap // 2, inst.slots_free)]:
        start_move(state, request, inst, now, out)


def rebalance(state: State, now: float, out: list[Action]) -> None:
    """Bring the partition of instances over versions in line with the requests.

    What is decided and does not fit into this event is begun by the next ones (`carry_on`); a
    rebalance that comes before the end of that decides anew.
    """
    state.rebalance_wanted = False
    state.rebalanced_s = now
    awake: list[Instance] = []
    single: list[Instance] = []
    state.flips.clear()
    state.seats.clear()
    for inst in state.instances.values():  # one pass: there may be thousands
        if inst.awake:
            awake.append(inst)
            if inst.resident_max == 1:
                single.append(inst)
            else:
                state.seats.append(inst.id)
            if not inst.requests and not inst.incoming:
                state.stirred[inst.id] = None
    _seat_some(state, now, out)
    looked_at = len(awake) // LOOKS_PER_ACTION
    state.partition_due = bool(single) and state.params.repartition
    if state.partition_due and state.has_room(out, looked_at):
        _repartition(state, single)
    carry_on(state, now, out, looked_at)
    if state.partition_due or state.seats or state.flips or not state.has_room(out, looked_at):
        return  # who has no instance then is found by `step`, which asks for another rebalance
    for live in list(state.versions.values()):
        if live.num_active and not live.holders and not live.coming:
            _secure(state, live, awake, now, out)


def carry_on(state: State, now: float, out: list[Action], more: int = 0) -> None:
    """Go on with what was decided, as far as this event has room, and look at who was stirred."""
    _seat_some(state, now, out)
    if state.partition_due and not more:
        single = [i for i in state.instances.values() if i.awake and i.resident_max == 1]
        _repartition(state, single)
        more = len(single) // LOOKS_PER_ACTION
    while state.flips and state.has_room(out, more):
        name, old, new = state.flips.popleft()
        inst = state.instances.get(name)
        as_decided = inst is not None and inst.awake and _assigned(inst) == old
        if inst is not None and as_decided and new in state.versions:
            _flip(state, inst, old, new, state.flip_room, now, out)
    if not state.seats and not state.flips and state.has_room(out, more):
        stir(state, now, out)


def _seat_some(state: State, now: float, out: list[Action]) -> None:
    while state.seats and state.has_room(out):
        inst = state.instances.get(state.seats.popleft())
        if inst is not None and inst.awake:
            _seat_newest(state, inst, now, out)


def _seat_newest(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    """An instance with several seats holds the newest version beside the ones it runs."""
    newest = state.newest
    if newest in inst.held or newest in inst.wants or inst.loading == newest:
        return
    if len(inst.held) >= inst.resident_max and _spare_seat(state, inst) is None:
        shared = [
            (held.num, version)
            for version, held in inst.held.items()
            if version not in inst.leaving and len(state.versions[version].holders) > 1
        ]
        if not shared:
            return  # the new version waits here
        leave(state, inst, min(shared)[1], now, out)
    want(state, inst, newest, now, out)


def _assigned(inst: Instance) -> Version | None:
    """The version a one-seat instance holds or is about to hold."""
    if inst.wants:
        return inst.wants[-1]
    if inst.loading is not None:
        return inst.loading
    for version in inst.held:
        if version not in inst.leaving:
            return version
    return None


def _repartition(state: State, single: list[Instance]) -> None:
    """Decide which instances change their version: `state.flips`."""
    state.partition_due = False
    demand = {v: live.num_active for v, live in state.versions.items() if live.num_active}
    target = shares(demand, len(single))
    given: dict[Version | None, list[Instance]] = {}
    for inst in single:
        given.setdefault(_assigned(inst), []).append(inst)
    total = sum(demand.values())
    lacking: dict[Version, int] = {}
    for version, share in target.items():
        have = len(given.get(version, ()))
        quota = len(single) * demand[version] / total
        useful = state.versions[version].num_pending or state.params.level_running
        if not have or (useful and quota - have >= state.params.flip_gain_min):
            # A smaller gap is not worth a load, and an instance that nothing waits for and
            # nothing moves to would stay empty.
            lacking[version] = share - have
    if not any(gap > 0 for gap in lacking.values()):
        return
    first = sorted(
        (v for v, gap in lacking.items() if gap > 0),
        key=lambda v: (bool(state.versions[v].holders or state.versions[v].coming), v),
    )
    needs = [v for v in first for _ in range(lacking[v])]
    spare: list[tuple[int, int, Instance, Version | None]] = []
    for version, members in given.items():
        surplus = len(members) - (target.get(version, 0) if version is not None else 0)
        if surplus > 0:
            costs = [(_cost(inst, version), -inst.index, inst, version) for inst in members]
            costs.sort()  # by cost, then by index: no two are equal
            spare += costs[: min(surplus, len(needs))]
    spare.sort()
    given_up = {old for _, _, _, old in spare[: len(needs)] if old in state.versions}
    state.flip_room = {old: _room(state, old) for old in given_up}
    if state.params.level_running:
        for version in set(needs):
            live = state.versions[version]
            live.donors = sorted(live.holders, key=lambda name: state.instances[name].load)
    chosen = zip(needs, spare, strict=False)
    state.flips = deque((inst.id, old, version) for version, (_, _, inst, old) in chosen)


def _cost(inst: Instance, version: Version | None) -> int:
    """KV tokens that would have to move if the instance gave this version up."""
    if version is None or not inst.requests:
        return 0
    held = inst.held.get(version)
    return kv_estimate(inst, held) if held is not None and held.num else 0


def _room(state: State, version: Version) -> int:
    """Free slots on the awake holders of a version."""
    room, instances = 0, state.instances
    for name in state.versions[version].holders:
        inst = instances[name]
        if inst.awake:
            room += inst.slots_max - len(inst.requests) - len(inst.incoming)
    return room


def _flip(
    state: State,
    inst: Instance,
    old: Version | None,
    new: Version,
    room: dict[Version, int],
    now: float,
    out: list[Action],
) -> None:
    live = state.versions[new]
    held = inst.held.get(old) if old is not None else None
    if old is not None and held is not None and inst.id in state.versions[old].holders:
        left = room[old] - inst.slots_free
        if held.busy and left < held.num + held.incoming and (live.holders or live.coming):
            return  # the new version has an instance, and the old one has no room elsewhere
        room[old] = left - held.num
    for version in list(inst.wants):
        _unwant(state, inst, version)
    for version in list(inst.held):
        if version not in inst.leaving and version in state.versions:
            leave(state, inst, version, now, out)
    want(state, inst, new, now, out)


def _secure(state: State, live: Live, awake: list[Instance], now: float, out: list[Action]) -> None:
    """Find a seat for a version that has requests and no instance. Older versions come first."""
    best: tuple[int, int, int, Instance, Version | None] | None = None
    for inst in awake:
        if inst.wants or inst.loading is not None:
            continue
        if len(inst.held) < inst.resident_max or _spare_seat(state, inst) is not None:
            option = (0, inst.load, inst.index, inst, None)
        else:
            loose = [
                (held.num, v)
                for v, held in inst.held.items()
                if v not in inst.leaving
                and (v > live.version or len(state.versions[v].holders) > 1)
            ]
            if not loose:
                continue
            option = (1 + min(loose)[0], inst.load, inst.index, inst, min(loose)[1])
        if best is None or option[:3] < best[:3]:
            best = option
        if best[:2] == (0, 0):
            break  # instances come by their index: no later one is better
    if best is not None:
        if best[4] is not None:
            leave(state, best[3], best[4], now, out)
        want(state, best[3], live.version, now, out)


def stir(state: State, now: float, out: list[Action]) -> None:
    """Instances that a request has left: continue their loads, give idle ones something to do."""
    while state.stirred and state.has_room(out):
        for name in list(state.stirred):  # others may be stirred meanwhile
            if not state.has_room(out):
                return
            del state.stirred[name]
            inst = state.instances.get(name)
            if inst is None or not inst.awake:
                continue
            if inst.wants:
                pump(state, inst, now, out)
            elif not inst.load and inst.loading is None:
                _employ(state, inst, now, out)


def _employ(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    """An idle instance holds the version that waits for one, else the newest."""
    newest = state.newest
    waiting = [
        (bool(live.holders or live.coming), -live.num_pending, live.version)
        for live in state.versions.values()
        if live.num_pending and live.version not in inst.held
    ]
    version = min(waiting)[2] if waiting else newest
    if version in inst.held:
        return
    if len(inst.held) >= inst.resident_max and _spare_seat(state, inst) is None:
        return
    want(state, inst, version, now, out)


def retire_finished(state: State, out: list[Action]) -> None:
    """Versions older than the last durable one, with no group left, leave the window.

    Their seats come free as far as this event has room; the last seat makes the retirement.
    """
    state.retiring = False
    for live in list(state.versions.values()):
        if live.version >= state.durable or live.unended:
            continue
        assert not live.num_active, "a version retired with requests on it"
        for name in [*live.holders, *live.leavers]:
            if not state.has_room(out):
                state.retiring = True
                return
            unload(state, state.instances[name], live.version, out)
            state.stirred[name] = None
        for name in list(live.coming):
            inst = state.instances[name]
            if live.version in inst.wants:
                inst.wants.remove(live.version)
        del state.versions[live.version]
        out.append(RetireVersion(live.version))
