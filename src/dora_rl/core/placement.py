"""Which instance decodes which request: slots, the least-loaded holder, pending queues, moves.

Every change of a request's place goes through `attach`, `detach`, `enqueue` and `dequeue`, so that
the counters of instances and versions always equal a recount. The least-loaded holder of a
version comes from a heap with lazily discarded entries: O(log n), never a scan.
"""

from __future__ import annotations

import heapq
from collections import deque

from dora_rl.core.actions import Abort, Action, Dispatch, How, Move, Park, Reversion, Unpark
from dora_rl.core.params import Params
from dora_rl.core.state import GENERATING, GroupPhase, Instance, Live, Phase, Request, State
from dora_rl.core.waits import MOVE, watch
from dora_rl.types import Mode, RequestId, Version


def pressured(state: State, inst: Instance) -> bool:
    return inst.kv_tokens > state.params.kv_high * inst.kv_tokens_max > 0


def _key(inst: Instance) -> float:
    return (inst.load + 1) / (inst.slots_max * inst.speed)


def reindex(state: State, inst: Instance) -> None:
    """The instance's load changed: offer it again in the heaps of the versions it holds."""
    if inst.load_queue or not inst.load:
        state.maybe_idle[inst.id] = None  # or drained: see orchestrate.assign_idle
    if not inst.awake or inst.slots_free <= 0 or pressured(state, inst):
        return
    key = _key(inst)
    for version in inst.held:
        if (live := state.versions.get(version)) is None or version in inst.leaving:
            continue
        heapq.heappush(live.heap, (key, inst.index, inst.id))
        if len(live.heap) > 2 * len(live.holders) + 64:
            _rebuild(state, live)


def _rebuild(state: State, live: Live) -> None:
    high, heap, instances = state.params.kv_high, live.heap, state.instances
    heap.clear()
    for name in live.holders:  # the same as `reindex`, written out: there may be thousands
        inst = instances[name]
        load = len(inst.requests) + len(inst.incoming)
        pressed = inst.kv_tokens > high * inst.kv_tokens_max > 0
        if inst.awake and load < inst.slots_max and not pressed:
            heap.append(((load + 1) / (inst.slots_max * inst.speed), inst.index, name))
    heapq.heapify(heap)


def best_holder(state: State, live: Live) -> Instance | None:
    """The least-loaded awake instance that holds the version and has a free slot."""
    heap = live.heap
    while heap:
        key, index, name = heap[0]
        inst = state.instances.get(name)
        if (
            inst is not None
            and inst.index == index
            and name in live.holders
            and inst.awake
            and inst.slots_free > 0
            and _key(inst) == key
            and not pressured(state, inst)
        ):
            return inst
        heapq.heappop(heap)
    return None


def attach(state: State, request: Request, inst: Instance) -> None:
    """The request decodes on this instance from now on."""
    held = inst.held[request.version]
    request.phase, request.instance, request.dest = Phase.RUNNING, inst.id, None
    request.kv_version = request.version
    request.mark = inst.decode_steps
    held.num += 1
    held.offset += request.base_tokens - request.mark
    inst.requests[request.id] = None
    inst.still.pop(request.id, None)
    reindex(state, inst)


def detach(state: State, request: Request) -> Instance:
    """Take a running request off its instance, remembering how long it has become."""
    assert request.phase is Phase.RUNNING and request.instance is not None
    inst = state.instances[request.instance]
    held = inst.held[request.version]
    held.num -= 1
    held.offset -= request.base_tokens - request.mark
    request.base_tokens = state.length_of(request)
    del inst.requests[request.id]
    reindex(state, inst)
    return inst


def enqueue(state: State, request: Request, parked_at: Instance | None, *, first: bool) -> None:
    """The request waits for a slot of its version; its KV may be parked at an instance."""
    live = state.versions[request.version]
    request.phase, request.instance, request.dest = Phase.PENDING, None, None
    if parked_at is not None:
        request.instance = parked_at.id
        parked_at.parked[request.id] = None
    live.num_pending += 1
    pending = live.suspects if request.suspect else live.pending
    (pending.appendleft if first else pending.append)(request.id)


def dequeue(state: State, request: Request) -> None:
    """It no longer waits. Its entry in the queue is skipped when it comes up."""
    state.versions[request.version].num_pending -= 1
    if request.instance is not None:
        state.instances[request.instance].parked.pop(request.id, None)


def next_waiting(state: State, live: Live, queue: deque[RequestId]) -> Request | None:
    """The first request that still waits in a queue of this version."""
    while queue:
        if (request := state.request(queue[0])) is not None and _waits_in(live, queue, request):
            return request
        queue.popleft()
    return None


def _waits_in(live: Live, queue: deque[RequestId], request: Request) -> bool:
    """Does its entry in the queue still hold? Suspects have a queue of their own."""
    waits = request.phase is Phase.PENDING and request.version == live.version
    return waits and request.suspect == (queue is live.suspects)


def cheaper_way(params: Params, num_tokens: int) -> How:
    """Move the KV cache of a request where that is allowed and faster than to prefill it again."""
    cost = params.cost
    move_s = cost.move_overhead_s + num_tokens * cost.kv_bytes_per_token / cost.link_bytes_per_s
    faster = move_s <= num_tokens / cost.prefill_tokens_per_s
    return How.KV if params.kv_moves and faster else How.PREFILL


def start_move(
    state: State, request: Request, dst: Instance, now: float, out: list[Action]
) -> None:
    """Hand a running or parked request over to another instance of its own version."""
    src = state.instances[request.instance or ""]
    if request.phase is Phase.RUNNING:
        detach(state, request)
        src.requests[request.id] = None  # it keeps its slot until it has left
        src.held[request.version].outgoing += 1
    else:
        state.versions[request.version].num_pending -= 1  # stays in src.parked until moved
    request.phase, request.dest = Phase.MOVING, dst.id
    dst.incoming[request.id] = None
    dst.held[request.version].incoming += 1
    reindex(state, dst)
    request.num_moves += 1
    how, number = cheaper_way(state.params, request.base_tokens), request.num_moves
    out.append(Move(request.id, request.epoch, request.version, src.id, dst.id, how, number))
    watch(state, MOVE, request, now)


def end_move(state: State, request: Request) -> None:
    """Forget both ends of a move; the caller decides where the request goes next."""
    assert request.phase is Phase.MOVING
    src = state.instances.get(request.instance or "")
    dst = state.instances.get(request.dest or "")
    if src is not None:
        if request.id in src.parked:
            del src.parked[request.id]
        elif request.id in src.requests:
            del src.requests[request.id]
            src.held[request.version].outgoing -= 1
            reindex(state, src)
    if dst is not None and request.id in dst.incoming:
        del dst.incoming[request.id]
        dst.held[request.version].incoming -= 1
        reindex(state, dst)


def release(state: State, request: Request) -> None:
    """Take a generating request from wherever it is."""
    if request.phase is Phase.RUNNING:
        detach(state, request)
    elif request.phase is Phase.MOVING:
        end_move(state, request)
    else:
        dequeue(state, request)
    request.instance = request.dest = None


def requeue(state: State, request: Request) -> None:
    """From wherever it is back to the queue of its version; it continues from its journal."""
    release(state, request)
    request.epoch += 1
    enqueue(state, request, None, first=True)


def stop_isolating(state: State, inst: Instance) -> None:
    """The instance is no longer kept free for suspects."""
    live = state.versions.get(inst.isolating) if inst.isolating is not None else None
    if live is not None:
        live.isolation = None
    inst.isolating = None
    reindex(state, inst)


def park(state: State, request: Request, out: list[Action]) -> None:
    """Stop a running request and keep its KV in the host memory of its instance.

    A suspect has little to keep, and runs nowhere but alone: it goes back to its queue.
    """
    name = request.instance or ""
    if request.suspect:
        out.append(Abort(name, request.id, request.epoch))
        requeue(state, request)
        return
    out.append(Park(name, request.id, request.epoch))
    enqueue(state, request, detach(state, request), first=True)


def drain(state: State, inst: Instance, version: Version, now: float, out: list[Action]) -> None:
    """Empty one version off an instance: to another holder where there is room, else parked."""
    live = state.versions[version]
    for request in state.running_on(inst):
        if request.version != version:
            continue
        stays = state.params.mode is Mode.PARTIAL or request.suspect
        dst = None if stays else best_holder(state, live)
        if dst is None or dst.id == inst.id:
            park(state, request, out)
        else:
            start_move(state, request, dst, now, out)


def dispatch_pending(state: State, live: Live, now: float, out: list[Action]) -> None:
    """Give pending requests of one version the free slots of its holders."""
    stuck: list[Request] = []
    while live.num_pending > len(stuck) and state.has_room(out):
        if (request := next_waiting(state, live, live.pending)) is None:
            break
        inst = _place_for(state, live, request)
        room = _room_for(live, inst) if inst is not None else 0
        if inst is None or room < 1:
            if state.params.mode is not Mode.PARTIAL or request.instance is None:
                break  # the next ones would find nothing either
            stuck.append(request)  # only its own instance may continue it
            live.pending.popleft()
        elif request.instance is None:
            _dispatch(state, live, request, inst, room, out)
        else:
            live.pending.popleft()
            _restart_parked(state, request, inst, now, out)
    live.pending.extendleft(request.id for request in reversed(stuck))


def _place_for(state: State, live: Live, request: Request) -> Instance | None:
    if request.instance is not None:
        home = state.instances[request.instance]
        usable = home.awake and home.slots_free > 0 and not pressured(state, home)
        if usable and home.id in live.holders:
            return home
        if state.params.mode is Mode.PARTIAL:
            return None
    return best_holder(state, live)


def _room_for(live: Live, inst: Instance) -> int:
    """Slots to give out now: while others are loading the version, not more than a fair share."""
    if not live.coming:
        return inst.slots_free
    share = -(-live.num_active // (len(live.holders) + len(live.coming)))
    held = inst.held[live.version]
    return min(inst.slots_free, share - held.num - held.incoming)


def _restart_parked(
    state: State, request: Request, inst: Instance, now: float, out: list[Action]
) -> None:
    if inst.id != request.instance:
        start_move(state, request, inst, now, out)
        return
    dequeue(state, request)
    kind = Unpark if request.kv_version == request.version else Reversion
    out.append(kind(inst.id, request.id, request.epoch, request.version))
    attach(state, request, inst)


def _dispatch(
    state: State, live: Live, first: Request, inst: Instance, room: int, out: list[Action]
) -> None:
    """Start `first` and the pending samples of its group behind it, as many as there is room."""
    group = state.groups[first.id.group]
    started: list[Request] = []
    while len(started) < room and live.pending and live.pending[0].group == group.id:
        request = group.requests[live.pending[0].sample]
        if _waits_in(live, live.pending, request):
            if request.instance is not None or (request.epoch > 0) != (first.epoch > 0):
                break
            dequeue(state, request)
            attach(state, request, inst)
            started.append(request)
        live.pending.popleft()
    if group.phase is GroupPhase.ISSUED:
        group.phase = GroupPhase.RUNNING
    out.append(dispatch_of(state, started, inst))


def dispatch_of(state: State, requests: list[Request], inst: Instance) -> Dispatch:
    """The order to start samples of one group, or to continue them from their journals."""
    group, version = state.groups[requests[0].id.group], requests[0].version
    samples = tuple(request.id.sample for request in requests)
    epochs = tuple(request.epoch for request in requests)
    return Dispatch(inst.id, group.id, group.prompt, version, samples, epochs, epochs[0] > 0)


def reversion_all(state: State, out: list[Action]) -> None:
    """The `partial` baseline: every generating request continues on the newest version.

    C1 is given up here, explicitly: the request's version changes, its group keeps the version it
    was admitted on (so the staleness bound still counts from its oldest token), and the engine
    records a version segment when it continues.
    """
    for group in state.groups.values():
        for request in group.requests:
            if request.phase in GENERATING and request.version != state.newest:
                _reversion(state, request, out)


def _reversion(state: State, request: Request, out: list[Action]) -> None:
    assert request.phase is not Phase.MOVING, "partial never moves requests"
    if request.phase is Phase.RUNNING:
        inst = state.instances[request.instance or ""]
        if state.newest in inst.held:
            detach(state, request)
            _set_newest(state, request)
            attach(state, request, inst)
            out.append(Reversion(inst.id, request.id, request.epoch, request.version))
            return
        park(state, request, out)
    home = state.instances.get(request.instance or "")
    dequeue(state, request)
    _set_newest(state, request)
    enqueue(state, request, home, first=False)


def _set_newest(state: State, request: Request) -> None:
    state.versions[request.version].num_active -= 1
    request.version = state.newest
    state.versions[request.version].num_active += 1
