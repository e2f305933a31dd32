"""Which instance decodes which request: slots, the least-loaded holder, pending queues.

Every change of a request's place goes through `attach`, `detach`, `queue` and `unqueue`, so that
the counters of instances and versions always equal a recount. The least-loaded holder of a
version comes from a heap with lazily discarded entries: O(log n), never a scan.
"""

from __future__ import annotations

import heapq

from dora_rl.core.actions import Abort, Action, Dispatch, Move, Park, Reversion, Unpark
from dora_rl.core.deadlines import watch_move
from dora_rl.core.migration import cheaper_way
from dora_rl.core.state import GroupPhase, Held, Instance, Live, Phase, Request, State
from dora_rl.types import Mode, Version


def kv_estimate(inst: Instance, held: Held) -> int:
    """Tokens of KV cache that this version's running requests occupy on the instance."""
    return held.offset + held.num * inst.decode_steps


def pressured(state: State, inst: Instance) -> bool:
    return inst.kv_tokens > state.params.kv_high * inst.kv_tokens_max > 0


def _key(inst: Instance) -> float:
    return (inst.load + 1) / (inst.slots_max * inst.speed)


def touch(state: State, inst: Instance) -> None:
    """The instance's load changed: offer it again in the heaps of the versions it holds."""
    if inst.wants or not inst.load:
        state.stirred[inst.id] = None  # it may be drained or idle now: see orchestrate.stir
    if not inst.awake or inst.slots_free <= 0 or pressured(state, inst):
        return
    key = _key(inst)
    for version in inst.held:
        live = state.versions.get(version)
        if live is None or version in inst.leaving:
            continue
        heapq.heappush(live.heap, (key, inst.index, inst.id))
        if len(live.heap) > 2 * len(live.holders) + 64:
            _rebuild(state, live)


def _rebuild(state: State, live: Live) -> None:
    high, heap, instances = state.params.kv_high, live.heap, state.instances
    heap.clear()
    for name in live.holders:  # the same as `touch`, written out: there may be thousands
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
    touch(state, inst)


def detach(state: State, request: Request) -> None:
    """Take a running request off its instance, remembering how long it has become."""
    assert request.phase is Phase.RUNNING and request.instance is not None
    inst = state.instances[request.instance]
    held = inst.held[request.version]
    held.num -= 1
    held.offset -= request.base_tokens - request.mark
    request.base_tokens = state.length_of(request)
    del inst.requests[request.id]
    touch(state, inst)


def queue(state: State, request: Request, parked_at: Instance | None, *, first: bool) -> None:
    """The request waits for a slot of its version; its KV may be parked at an instance."""
    live = state.versions[request.version]
    request.phase, request.dest = Phase.PENDING, None
    request.instance = parked_at.id if parked_at is not None else None
    if parked_at is not None:
        parked_at.parked[request.id] = None
    live.num_pending += 1
    pending = live.suspects if request.suspect else live.pending
    (pending.appendleft if first else pending.append)(request.id)


def unqueue(state: State, request: Request) -> None:
    """It no longer waits. Its entry in the queue is skipped when it comes up."""
    state.versions[request.version].num_pending -= 1
    if request.instance is not None:
        state.instances[request.instance].parked.pop(request.id, None)


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
    touch(state, dst)
    how = cheaper_way(state.params, request.base_tokens)
    request.num_moves += 1
    number = request.num_moves
    out.append(Move(request.id, request.epoch, request.version, src.id, dst.id, how, number))
    watch_move(state, request, now)


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
            touch(state, src)
    if dst is not None and request.id in dst.incoming:
        del dst.incoming[request.id]
        dst.held[request.version].incoming -= 1
        touch(state, dst)


def release(state: State, request: Request) -> Instance | None:
    """Take a generating request from wherever it is. Returns the instance it was running on."""
    was = state.instances.get(request.instance or "")
    if request.phase is Phase.RUNNING:
        detach(state, request)
    elif request.phase is Phase.MOVING:
        end_move(state, request)
    else:
        unqueue(state, request)
    request.instance = request.dest = None
    return was


def again(state: State, request: Request) -> None:
    """From wherever it is back to the queue of its version; it continues from its journal."""
    release(state, request)
    request.epoch += 1
    queue(state, request, None, first=True)


def stop_isolating(state: State, inst: Instance) -> None:
    """The instance is no longer kept free for suspects."""
    live = state.versions.get(inst.isolating) if inst.isolating is not None else None
    if live is not None:
        live.isolation = None
    inst.isolating = None
    touch(state, inst)


def park(state: State, request: Request, out: list[Action]) -> None:
    """Stop a running request and keep its KV in the host memory of its instance.

    A suspect has little to keep, and runs nowhere but alone: it goes back to its queue.
    """
    inst = state.instances[request.instance or ""]
    if request.suspect:
        out.append(Abort(inst.id, request.id, request.epoch))
        again(state, request)
        return
    detach(state, request)
    out.append(Park(inst.id, request.id, request.epoch))
    queue(state, request, inst, first=True)


def fill(state: State, live: Live, now: float, out: list[Action]) -> None:
    """Give pending requests of one version the free slots of its holders."""
    stuck: list[Request] = []
    while live.num_pending > len(stuck) and live.pending and state.has_room(out):
        rid = live.pending[0]
        request = state.request(rid)
        if not _waits(live, request):
            live.pending.popleft()
            continue
        assert request is not None
        inst = _place_for(state, live, request)
        room = _room_for(live, inst) if inst is not None else 0
        if inst is None or room < 1:
            if state.params.mode is not Mode.PARTIAL or request.instance is None:
                break  # the next ones would find nothing either
            stuck.append(request)  # only its own instance may continue it
            live.pending.popleft()
            continue
        live.pending.popleft()
        if request.instance is not None:
            _restart_parked(state, request, inst, now, out)
        else:
            _dispatch(state, live, request, inst, room, out)
    live.pending.extendleft(request.id for request in reversed(stuck))


def _waits(live: Live, request: Request | None) -> bool:
    """Does this entry of the queue still hold? Suspects have a queue of their own."""
    if request is None or request.phase is not Phase.PENDING or request.suspect:
        return False
    return request.version == live.version


def _room_for(live: Live, inst: Instance) -> int:
    """Slots to give out now: while others are loading the version, not more than a fair share."""
    if not live.coming:
        return inst.slots_free
    share = -(-live.num_active // (len(live.holders) + len(live.coming)))
    held = inst.held[live.version]
    return min(inst.slots_free, share - held.num - held.incoming)


def _place_for(state: State, live: Live, request: Request) -> Instance | None:
    if request.instance is not None:
        home = state.instances[request.instance]
        usable = home.awake and home.slots_free > 0 and not pressured(state, home)
        if usable and home.id in live.holders:
            return home
        if state.params.mode is Mode.PARTIAL:
            return None
    return best_holder(state, live)


def _restart_parked(
    state: State, request: Request, inst: Instance, now: float, out: list[Action]
) -> None:
    if inst.id != request.instance:
        start_move(state, request, inst, now, out)
        return
    same = request.kv_version == request.version
    unqueue(state, request)
    kind = Unpark if same else Reversion
    out.append(kind(inst.id, request.id, request.epoch, request.version))
    attach(state, request, inst)


def _dispatch(
    state: State, live: Live, first: Request, inst: Instance, room: int, out: list[Action]
) -> None:
    """Start `first` and the pending samples of its group behind it, as many as there is room."""
    group = state.groups[first.id.group]
    resume = first.epoch > 0
    samples: list[int] = []
    epochs: list[int] = []
    request: Request | None = first
    while request is not None:
        unqueue(state, request)
        attach(state, request, inst)
        samples.append(request.id.sample)
        epochs.append(request.epoch)
        request = None
        while live.pending and len(samples) < room:
            rid = live.pending[0]
            if rid.group != group.id:
                break
            other = group.requests[rid.sample]
            if not _waits(live, other):
                live.pending.popleft()
                continue
            if other.instance is None and (other.epoch > 0) == resume:
                live.pending.popleft()
                request = other
            break
    if group.phase is GroupPhase.ISSUED:
        group.phase = GroupPhase.RUNNING
    out.append(
        Dispatch(
            inst.id, group.id, group.prompt, live.version, tuple(samples), tuple(epochs), resume
        )
    )


def relocate(state: State, inst: Instance, version: Version, now: float, out: list[Action]) -> None:
    """Empty one version off an instance: to another holder where there is room, else parked."""
    live = state.versions[version]
    for rid in list(inst.requests):
        request = state.request(rid)
        assert request is not None
        if request.version != version or request.phase is not Phase.RUNNING:
            continue
        stays = state.params.mode is Mode.PARTIAL or request.suspect
        dst = None if stays else best_holder(state, live)
        if dst is None or dst.id == inst.id:
            park(state, request, out)
        else:
            start_move(state, request, dst, now, out)
