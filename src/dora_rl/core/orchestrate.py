"""The load-balancing orchestrator: which instance holds which version, and which ones sleep.

Triggers: a step's end (always), KV pressure, a period, an instance joining or leaving, a version
with requests and no instance, an instance with nothing to do. Between rebalances an event costs
O(live versions + log n); a rebalance looks at every instance once and flips as few as possible.
What it decides is begun by this event and the next ones: each causes `event_actions_max` actions.
In a large fleet the partition itself is decided by the event after the one that looked.

    request_load     the instance shall hold this version   evict        it shall give it up
    start_next_load  once a weight slot is free             assign_idle  find work for idle ones
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from dora_rl.core.actions import Action, Load, RetireVersion, Sleep, Unload, Wake
from dora_rl.core.events import Loaded, LoadFailed
from dora_rl.core.placement import (
    best_holder,
    drain,
    reindex,
    start_move,
    stop_isolating,
)
from dora_rl.core.state import Held, Instance, Live, State
from dora_rl.core.waits import LOAD, watch
from dora_rl.types import InstanceId, Mode, Version

LOOKS_PER_ACTION = 10  # to look at so many instances takes as long as to cause an action


def request_load(
    state: State, inst: Instance, version: Version, now: float, out: list[Action]
) -> None:
    """The instance shall hold this version as soon as it has a weight slot for it."""
    if version in inst.leaving:  # it is still here: it stays
        del inst.leaving[version]
        live = state.versions[version]
        del live.leavers[inst.id]
        live.holders[inst.id] = None
        reindex(state, inst)
    if not inst.will_hold(version):
        inst.load_queue.append(version)
        state.versions[version].coming[inst.id] = None
        start_next_load(state, inst, now, out)


def evict(state: State, inst: Instance, version: Version, now: float, out: list[Action]) -> None:
    """Give a version up: no new requests, running ones go elsewhere, then its slot is free."""
    live = state.versions[version]
    inst.leaving[version] = None
    live.leavers[inst.id] = None
    live.holders.pop(inst.id, None)
    drain(state, inst, version, now, out)


def start_next_load(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    """Begin the next load if nothing is loading and a weight slot is (or can be made) free."""
    queue = inst.load_queue
    while queue and (queue[0] not in state.versions or queue[0] in inst.held):
        _cancel_load(state, inst, queue[0])
    if inst.loading is not None or not queue or not inst.awake:
        return
    if len(inst.held) >= inst.resident_max:
        if (unneeded := _unneeded(state, inst)) is None:
            return
        unload(state, inst, unneeded, out)
    version = queue.pop(0)
    inst.loading = version
    inst.donor = _donor(state, state.versions[version]) if not inst.load_failures else None
    inst.num_loads += 1
    out.append(Load(inst.id, version, inst.donor, inst.num_loads))
    watch(state, LOAD, inst, now)


def _cancel_load(state: State, inst: Instance, version: Version) -> None:
    inst.load_queue.remove(version)
    if (live := state.versions.get(version)) is not None:
        live.coming.pop(inst.id, None)


def _unneeded(state: State, inst: Instance) -> Version | None:
    """A resident version that can go at once: nothing of it is here, and nothing needs it here."""
    for version, held in inst.held.items():
        live = state.versions.get(version)
        needed = live is not None and live.num_active and len(live.holders) <= 1
        if not held.busy and (version in inst.leaving or not needed):
            return version
    return None


def _has_weight_slot(state: State, inst: Instance) -> bool:
    return len(inst.held) < inst.resident_max or _unneeded(state, inst) is not None


def _least_used(state: State, inst: Instance, wanted: Version) -> tuple[int, Version] | None:
    """The resident version that makes way for `wanted`, and how many requests it has here.

    It is newer than the wanted one, or has other instances.
    """
    return min(
        (
            (held.num, version)
            for version, held in inst.held.items()
            if version not in inst.leaving
            and (version > wanted or len(state.versions[version].holders) > 1)
        ),
        default=None,
    )


def unload(state: State, inst: Instance, version: Version, out: list[Action]) -> None:
    assert not inst.held[version].busy, "a version was unloaded with requests on it"
    del inst.held[version]
    inst.leaving.pop(version, None)
    if inst.isolating == version:
        stop_isolating(state, inst)
    if (live := state.versions.get(version)) is not None:
        live.holders.pop(inst.id, None)
        live.leavers.pop(inst.id, None)
    out.append(Unload(inst.id, version))


def _donor(state: State, live: Live) -> InstanceId | None:
    """A peer that hands a request over if levelling is on, else the least loaded holder."""
    while state.params.level_running and live.donors:
        if (name := live.donors.pop()) in live.holders:
            return name
    peer = best_holder(state, live)
    return peer.id if peer is not None else next(iter(live.holders), None)


def loading_instance(state: State, event: Loaded | LoadFailed) -> Instance | None:
    """The instance, if the load that this answers is the one that it was last told to do."""
    if (inst := state.instances.get(event.instance)) is None or inst.loading != event.version:
        return None
    return inst if event.attempt in (-1, inst.num_loads) else None


def on_loaded(state: State, event: Loaded, now: float, out: list[Action]) -> None:
    inst, version = loading_instance(state, event), event.version
    if inst is None:
        return
    inst.loading = None
    inst.load_failures = 0
    inst.held[version] = Held()
    if (live := state.versions.get(version)) is None:  # retired while it was loading
        unload(state, inst, version, out)
    else:
        live.load_failures = 0
        live.coming.pop(inst.id, None)
        live.holders[inst.id] = None
        reindex(state, inst)
        if state.params.level_running and state.params.mode is not Mode.PARTIAL:
            _level(state, inst, live, now, out)
    start_next_load(state, inst, now, out)


def _level(state: State, inst: Instance, live: Live, now: float, out: list[Action]) -> None:
    """Take running requests over from the donor until the two are level."""
    donor = state.instances.get(inst.donor or "")
    if donor is None or donor.id not in live.holders or live.num_pending or not inst.awake:
        return
    if (gap := donor.load - inst.load) <= state.params.level_slack * donor.slots_max:
        return
    movable = [r for r in state.running_on(donor) if r.version == live.version]
    movable.sort(key=lambda r: (state.length_of(r), r.id))
    for request in movable[: min(gap // 2, inst.slots_free)]:
        start_move(state, request, inst, now, out)


# -- which instance holds which version ------------------------------------------------------------


def rebalance(state: State, now: float, out: list[Action]) -> None:
    """Bring the partition of instances over versions in line with the requests.

    What is decided and does not fit into this event is begun by the next ones; a rebalance that
    comes before the end of that decides anew.
    """
    state.rebalance_wanted = False
    state.rebalanced_s = now
    state.flips.clear()
    awake = [inst for inst in state.instances.values() if inst.awake]
    single = [inst for inst in awake if inst.resident_max == 1]
    state.newest_due = deque(inst.id for inst in awake if inst.resident_max != 1)
    state.maybe_idle.update((inst.id, None) for inst in awake if not inst.load)
    _load_newest(state, now, out)
    looked_at = len(awake) // LOOKS_PER_ACTION
    state.partition_due = bool(single) and state.params.repartition
    if state.partition_due and state.has_room(out, looked_at):
        _repartition(state, single)
    continue_rebalance(state, now, out, looked_at)
    undone = state.partition_due or state.newest_due or state.flips
    if undone or not state.has_room(out, looked_at):
        return  # who has no instance then is found by `step`, which asks for another rebalance
    for live in list(state.versions.values()):
        if live.num_active and not live.holders and not live.coming:
            _find_instance(state, live, awake, now, out)


def continue_rebalance(state: State, now: float, out: list[Action], more: int = 0) -> None:
    """Go on with what was decided, as far as this event has room, then look at idle instances."""
    _load_newest(state, now, out)
    if state.partition_due and not more:
        single = [i for i in state.instances.values() if i.awake and i.resident_max == 1]
        _repartition(state, single)
        more = len(single) // LOOKS_PER_ACTION
    while state.flips and state.has_room(out, more):
        name, old, new = state.flips.popleft()
        inst = state.instances.get(name)
        as_decided = inst is not None and inst.awake and _assigned(inst) == old
        if inst is not None and as_decided and new in state.versions:
            _flip(state, inst, old, new, now, out)
    if not state.newest_due and not state.flips and state.has_room(out, more):
        assign_idle(state, now, out)


def _load_newest(state: State, now: float, out: list[Action]) -> None:
    """An instance with several weight slots holds the newest version beside the ones it runs."""
    while state.newest_due and state.has_room(out):
        inst = state.instances.get(state.newest_due.popleft())
        if inst is None or not inst.awake or inst.will_hold(state.newest):
            continue
        if not _has_weight_slot(state, inst):
            if (least := _least_used(state, inst, state.newest)) is None:
                continue  # the new version waits here
            evict(state, inst, least[1], now, out)
        request_load(state, inst, state.newest, now, out)


def _assigned(inst: Instance) -> Version | None:
    """The version that an instance with one weight slot holds or is about to hold."""
    if inst.load_queue:
        return inst.load_queue[-1]
    stays = (version for version in inst.held if version not in inst.leaving)
    return inst.loading if inst.loading is not None else next(stays, None)


def shares(demand: Mapping[Version, int], num_instances: int) -> dict[Version, int]:
    """How many instances each version gets, in proportion to its requests.

    One for each version that has any request, then the next one to the largest (quota - given).
    Where versions outnumber instances the oldest come first and the newest waits.

    >>> shares({0: 2, 1: 6}, 4)   # LCFT, figure 6
    {0: 1, 1: 3}
    >>> shares({0: 1, 1: 1, 2: 1}, 2)
    {0: 1, 1: 1, 2: 0}
    """
    wanted = {v: n for v, n in sorted(demand.items()) if n > 0}
    if not wanted or num_instances <= len(wanted):
        return {v: int(place < num_instances) for place, v in enumerate(wanted)}
    total = sum(wanted.values())
    quota = {v: num_instances * n / total for v, n in wanted.items()}
    given = {v: max(1, int(q)) for v, q in quota.items()}
    left = num_instances - sum(given.values())
    for _ in range(left):
        given[max(given, key=lambda v: (quota[v] - given[v], -v))] += 1
    for _ in range(-left):
        given[min([v for v in given if given[v] > 1], key=lambda v: (quota[v] - given[v], -v))] -= 1
    return given


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
        have, live = len(given.get(version, ())), state.versions[version]
        gap = len(single) * demand[version] / total - have
        useful = live.num_pending or state.params.level_running
        if share > have and (not have or (useful and gap >= state.params.flip_gain_min)):
            # A smaller gap is not worth a load, and an instance that nothing waits for and
            # nothing moves to would stay empty.
            lacking[version] = share - have
    if not lacking:
        return
    lives = [state.versions[version] for version in lacking]
    lives.sort(key=lambda live: (bool(live.holders or live.coming), live.version))
    needs = [live.version for live in lives for _ in range(lacking[live.version])]
    spare: list[tuple[int, int, Instance, Version | None]] = []
    for version, members in given.items():
        surplus = len(members) - (target.get(version, 0) if version is not None else 0)
        if surplus > 0:
            costs = [(_flip_cost(inst, version), -inst.index, inst, version) for inst in members]
            # By cost, then by index: no two are equal.
            spare += sorted(costs)[: min(surplus, len(needs))]
    spare.sort()
    given_up = {old for _, _, _, old in spare[: len(needs)] if old in state.versions}
    state.flip_room = {old: _free_slots(state, old) for old in given_up}
    if state.params.level_running:
        for live in lives:
            live.donors = sorted(live.holders, key=lambda name: state.instances[name].load)
    chosen = zip(needs, spare, strict=False)
    state.flips = deque((inst.id, old, version) for version, (_, _, inst, old) in chosen)


def _flip_cost(inst: Instance, version: Version | None) -> int:
    """Tokens of KV cache that would have to move if the instance gave this version up."""
    held = inst.held.get(version) if version is not None else None
    return held.offset + held.num * inst.decode_steps if held is not None else 0


def _free_slots(state: State, version: Version) -> int:
    """On the awake holders of a version."""
    holders = map(state.instances.__getitem__, state.versions[version].holders)
    return sum(inst.slots_max - inst.load for inst in holders if inst.awake)


def _flip(
    state: State, inst: Instance, old: Version | None, new: Version, now: float, out: list[Action]
) -> None:
    live, room = state.versions[new], state.flip_room
    held = inst.held.get(old) if old is not None else None
    if old is not None and held is not None and inst.id in state.versions[old].holders:
        left = room[old] - inst.slots_free
        if held.busy and left < held.num + held.incoming and (live.holders or live.coming):
            return  # the new version has an instance, and the old one has no room elsewhere
        room[old] = left - held.num
    for version in list(inst.load_queue):
        _cancel_load(state, inst, version)
    for version in list(inst.held):
        if version not in inst.leaving and version in state.versions:
            evict(state, inst, version, now, out)
    request_load(state, inst, new, now, out)


def _find_instance(
    state: State, live: Live, awake: list[Instance], now: float, out: list[Action]
) -> None:
    """An instance for a version that has requests and none. Older versions come first."""
    best: tuple[int, int, int, Instance, Version | None] | None = None
    for inst in awake:
        if inst.load_queue or inst.loading is not None:
            continue
        option = (0, inst.load, inst.index, inst, None)
        if not _has_weight_slot(state, inst):
            if (least := _least_used(state, inst, live.version)) is None:
                continue
            option = (1 + least[0], inst.load, inst.index, inst, least[1])
        if best is None or option[:3] < best[:3]:
            best = option
        if best[:2] == (0, 0):
            break  # instances come by their index: no later one is better
    if best is not None:
        *_, inst, makes_way = best
        if makes_way is not None:
            evict(state, inst, makes_way, now, out)
        request_load(state, inst, live.version, now, out)


def assign_idle(state: State, now: float, out: list[Action]) -> None:
    """Instances that a request has left: continue their loads, give idle ones a version."""
    for name in _in_turn(state, state.maybe_idle, out):
        if (inst := state.instances.get(name)) is None or not inst.awake:
            continue
        if inst.load_queue:
            start_next_load(state, inst, now, out)
        elif not inst.load and inst.loading is None:
            _assign_version(state, inst, now, out)


def _assign_version(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    """An idle instance holds the version that waits for one, else the newest."""
    waiting = (
        (bool(live.holders or live.coming), -live.num_pending, live.version)
        for live in state.versions.values()
        if live.num_pending and live.version not in inst.held
    )
    *_, version = min(waiting, default=(state.newest,))
    if version not in inst.held and _has_weight_slot(state, inst):
        request_load(state, inst, version, now, out)


def retire_finished(state: State, out: list[Action]) -> None:
    """Versions older than the last durable one, with no group left, leave the window.

    Their weight slots come free as far as this event has room; the last one makes the retirement.
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
            state.maybe_idle[name] = None
        for name in list(live.coming):
            inst = state.instances[name]
            if live.version in inst.load_queue:
                inst.load_queue.remove(live.version)
        del state.versions[live.version]
        out.append(RetireVersion(live.version))


# -- instances on the learner's devices ------------------------------------------------------------
# They sleep from a batch's closing to its publication. Requests of a sleeping instance move with
# their KV where there is room, else they are parked with it; a parked request needs no instance.


def sleep_elastic(state: State, now: float, out: list[Action]) -> None:
    """None of them takes anything new; each is drained and sent to sleep as events have room."""
    state.to_wake.clear()
    for inst in state.instances.values():
        if inst.elastic and inst.awake:
            inst.awake = False
            state.slots_awake -= inst.slots_max
            state.to_sleep[inst.id] = None
    sleep_and_wake(state, now, out)


def wake_elastic(state: State, now: float, out: list[Action]) -> None:
    asleep = [inst for inst in state.instances.values() if inst.elastic and not inst.awake]
    state.to_wake |= {inst.id: None for inst in asleep}
    sleep_and_wake(state, now, out)


def sleep_and_wake(state: State, now: float, out: list[Action]) -> None:
    """As many as this event has room for."""
    for name in _in_turn(state, state.to_wake, out):
        inst = state.instances[name]
        inst.awake = True
        state.slots_awake += inst.slots_max
        if name in state.to_sleep:
            del state.to_sleep[name]  # it was never told to sleep
        else:
            out.append(Wake(name))
        reindex(state, inst)
    for name in _in_turn(state, state.to_sleep, out):
        inst = state.instances[name]
        for version in list(inst.held):
            drain(state, inst, version, now, out)
        out.append(Sleep(name))


def _in_turn(
    state: State, waiting: dict[InstanceId, None], out: list[Action]
) -> Iterator[InstanceId]:
    """Take instances off a list, as far as this event has room. Others may come meanwhile."""
    while waiting and state.has_room(out):
        for name in list(waiting):
            if not state.has_room(out):
                return
            del waiting[name]
            yield name
