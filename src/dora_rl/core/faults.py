"""Joining, losing, moves, deadlines: whatever happens, no request is lost and none done twice.

A lost request goes back to the queue of its own version with a higher epoch and continues from
its token journal. What the lost party may still say carries the old epoch and is ignored.
"""

from __future__ import annotations

import heapq

from dora_rl.core.actions import Abort, Action, OptimizerRewound, Restart, RestartLearner
from dora_rl.core.batching import end_durable, on_committed
from dora_rl.core.events import (
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    LearnerJoined,
    LearnerLost,
    LearnerReport,
    LoadFailed,
    Moved,
    MoveFailed,
    StepCommitted,
    Tick,
)
from dora_rl.core.freshness import disturb, note_report
from dora_rl.core.ledger import current, retry, retry_score, stop
from dora_rl.core.orchestrate import loading_instance, start_next_load
from dora_rl.core.placement import (
    attach,
    best_holder,
    drain,
    end_move,
    enqueue,
    park,
    pressured,
    reindex,
    start_move,
    stop_isolating,
)
from dora_rl.core.state import GENERATING, Held, Instance, Learner, Live, Phase, Request, State
from dora_rl.core.suspects import check_suspects, count_loss, lost_with
from dora_rl.core.waits import INSTANCE, LEARNER, SCORE, renew_deadlines, watch, watched
from dora_rl.types import InstanceId, Mode


def on_joined(state: State, event: InstanceJoined, now: float, out: list[Action]) -> None:
    state.incarnations[event.instance] = event.life
    # Whatever an earlier incarnation of it had continues elsewhere.
    lose_instance(state, event.instance, out, reason="it joined anew")
    inst = Instance(
        event.instance,
        state.next_instance,
        event.slots_max,
        event.resident_max,
        event.kv_tokens_max,
        event.elastic,
        awake=not (event.elastic and state.is_training),
        reported_s=now,
        progress_s=now,
    )
    state.next_instance += 1
    state.instances[inst.id] = inst
    state.num_elastic += inst.elastic
    if inst.awake:
        state.slots_awake += inst.slots_max
    for version in event.versions:
        if version in state.versions:
            inst.held[version] = Held()
            state.versions[version].holders[inst.id] = None
    reindex(state, inst)
    watch(state, INSTANCE, inst, now)
    state.maybe_idle[inst.id] = None
    state.rebalance_wanted = True


def on_lost(state: State, event: InstanceLost, now: float, out: list[Action]) -> None:
    if event.incarnation >= 0:
        state.incarnations[event.instance] = event.incarnation
    lose_instance(state, event.instance, out, reason=event.reason)


def lose_instance(
    state: State,
    name: InstanceId,
    out: list[Action],
    *,
    reason: str = "",
    blame: bool = True,
) -> None:
    """Forget an instance; everything it had continues elsewhere from the journal."""
    if (inst := state.instances.get(name)) is None:
        return
    why = f"instance {name} was lost" + (f": {reason}" if reason else "")
    had_work, company = inst.load > 0 or inst.loading is not None, inst.load
    for rid in [*inst.requests, *inst.incoming, *inst.parked]:
        if (request := state.request(rid)) is None or request.phase not in GENERATING:
            continue  # its group failed together with an earlier one of this list
        if request.phase is Phase.MOVING:
            others = [p for p in (request.instance, request.dest) if p not in (None, name)]
            out.extend(Abort(other, rid, request.epoch) for other in others)
        if blame and state.params.losses_max:
            lost_with(state, request, company, why, out)
        else:
            retry(state, request, f"instance {name} was lost", out, blame=blame)
    if inst.isolating is not None:
        stop_isolating(state, inst)
    for live in state.versions.values():
        for places in (live.holders, live.leavers, live.coming):
            places.pop(name, None)
    if inst.awake:
        state.slots_awake -= inst.slots_max
    state.num_elastic -= inst.elastic
    state.to_sleep.pop(name, None)
    state.to_wake.pop(name, None)
    if not state.instance_losses:
        state.losses_among = len(state.instances)
    del state.instances[name]
    state.rebalance_wanted = True
    if blame and had_work:
        count_loss(state, name, reason or "no reason was given", out)


def _replace_instance(state: State, inst: Instance, reason: str, out: list[Action]) -> None:
    out.append(Restart(inst.id, reason))
    lose_instance(state, inst.id, out, reason=reason)


def on_report(state: State, event: InstanceReport, now: float, out: list[Action]) -> None:
    if (inst := state.instances.get(event.instance)) is None:
        return
    was_pressured, speed = pressured(state, inst), inst.speed
    grew = event.decode_steps != inst.decode_steps
    if state.policy.freshness and inst.awake:
        num = inst.num_running - event.num_waiting
        steps, elapsed_s = event.decode_steps - inst.decode_steps, now - inst.reported_s
        note_report(state.freshness, num, steps, elapsed_s)
    inst.reported_s = now
    inst.decode_steps = event.decode_steps
    inst.kv_tokens = event.kv_tokens
    inst.speed = event.speed
    check_suspects(state, inst, now, out)
    # A request between two turns waits for its environment, which has a deadline of its own.
    if grew or not inst.awake or inst.num_running <= event.num_waiting:
        inst.progress_s = now
    if state.params.deadlines.progress_s and _break_stalls(state, inst, event, now, out):
        return
    if pressured(state, inst):
        _relieve(state, inst, now, out)
    elif was_pressured or speed != inst.speed:
        reindex(state, inst)


def _break_stalls(
    state: State, inst: Instance, event: InstanceReport, now: float, out: list[Action]
) -> bool:
    """Break the waits for tokens that do not come. True: the whole instance was given up."""
    limit_s, stalled_s = state.params.deadlines.progress_s, now - inst.progress_s
    if stalled_s >= limit_s:
        _replace_instance(
            state,
            inst,
            f"it reports {inst.num_running} requests and no token for {stalled_s:.0f} s",
            out,
        )
        return True
    inst.still = {rid: inst.still.get(rid, now) for rid in event.still if rid in inst.requests}
    for rid, since_s in list(inst.still.items()):
        request = state.request(rid)
        if now - since_s < limit_s or request is None or request.phase is not Phase.RUNNING:
            continue
        out.append(Abort(inst.id, rid, request.epoch))
        retry(state, request, f"no token for {now - since_s:.0f} s", out)
        inst.still.pop(rid, None)
    return False


def _relieve(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    """KV pressure: the youngest requests move to a holder with room, else spill to the host."""
    kv_low = state.params.kv_low
    excess = inst.kv_tokens - int(kv_low * inst.kv_tokens_max)
    for request in reversed(state.running_on(inst)):
        if excess <= 0 or len(inst.requests) <= 1:
            break
        excess -= state.length_of(request)
        peer = (
            None
            if state.params.mode is Mode.PARTIAL
            else best_holder(state, state.versions[request.version])
        )
        if (
            peer is not None
            and peer.id != inst.id
            and (not peer.kv_tokens_max or peer.kv_tokens < kv_low * peer.kv_tokens_max)
        ):
            start_move(state, request, peer, now, out)
        else:
            park(state, request, out)
    state.rebalance_wanted = True


def on_load_failed(state: State, event: LoadFailed, now: float, out: list[Action]) -> None:
    if (inst := loading_instance(state, event)) is None:
        return
    inst.loading = None
    inst.load_failures += 1
    live = state.versions.get(event.version)
    if live is not None and inst.donor is None and _never_loads(state, live, event, out):
        live.coming.pop(inst.id, None)
        return
    if inst.load_failures >= state.params.attempts_max:
        _replace_instance(state, inst, f"version {event.version} did not load: {event.reason}", out)
        return
    if live is not None and event.version not in inst.load_queue:
        inst.load_queue.insert(0, event.version)
        live.coming[inst.id] = None
    start_next_load(state, inst, now, out)


def _never_loads(state: State, live: Live, event: LoadFailed, out: list[Action]) -> bool:
    """Failed loads of a version that nobody holds, from the store, stop the run in the end."""
    live.load_failures += 1
    limit = state.params.load_failures_max
    if not limit or live.holders or live.load_failures < limit:
        return False
    stop(
        state,
        f"version {event.version} was refused {live.load_failures} times and loaded by no "
        f"instance; the last one, {event.instance}: {event.reason}",
        out,
    )
    return True


def _moving(state: State, event: Moved | MoveFailed) -> Request | None:
    """The request, if this move of it is still under way."""
    request = current(state, event.request, event.epoch)
    if request is None or request.phase is not Phase.MOVING:
        return None
    same = (request.instance, request.dest) == (event.src, event.dst)
    return request if same and event.attempt in (-1, request.num_moves) else None


def _may_run(inst: Instance, request: Request) -> bool:
    """False if it was decided while the request was on its way that it may not."""
    return request.version not in inst.leaving and inst.awake and inst.isolating is None


def on_moved(state: State, event: Moved, now: float, out: list[Action]) -> None:
    if (request := _moving(state, event)) is None:
        return
    dst = state.instances[event.dst]
    end_move(state, request)
    request.base_tokens = event.num_tokens
    attach(state, request, dst)
    if not _may_run(dst, request):
        drain(state, dst, request.version, now, out)


def on_move_failed(state: State, event: MoveFailed, now: float, out: list[Action]) -> None:
    if (request := _moving(state, event)) is None:
        return
    src = state.instances.get(event.src)
    if not event.kept or src is None:
        _retry_moving(state, request, (event.dst,), f"move failed: {event.reason}", out)
        return
    was_parked = request.id in src.parked
    end_move(state, request)
    if was_parked:
        enqueue(state, request, src, first=True)
        return
    attach(state, request, src)
    if not _may_run(src, request):
        park(state, request, out)


def _retry_moving(
    state: State,
    request: Request,
    places: tuple[InstanceId | None, ...],
    reason: str,
    out: list[Action],
) -> None:
    """A move that fails is not the request's fault, and its length is what makes it move."""
    known = [place for place in places if place is not None]
    out.extend(Abort(place, request.id, request.epoch) for place in known)
    retry(state, request, reason, out, blame=not state.params.losses_max)


def on_learner_joined(state: State, event: LearnerJoined, now: float, out: list[Action]) -> None:
    """A learner at the newest sealed version; what was fed and not committed is fed again."""
    learner, batch = state.learner, state.batches.get(state.committed)
    learner.incarnation = max(learner.incarnation, event.incarnation)
    sealed_unlogged = event.version == state.committed + 1
    assert event.version == state.committed or (sealed_unlogged and batch and batch.closed), (
        f"the learner holds version {event.version}, the log ends at {state.committed}"
    )
    state.on_disk = max(state.on_disk, event.durable)
    end_durable(state, out)
    learner.alive, learner.progress, learner.progress_s = True, -1, now
    watch(state, LEARNER, learner, now)
    if event.optimizer_version != event.version:
        out.append(OptimizerRewound(event.version, event.optimizer_version))
    for fed in state.batches.values():
        fed.num_fed, fed.close_sent = 0, False
    if sealed_unlogged and batch is not None:
        batch.close_sent = True
        on_committed(state, StepCommitted(state.committed, ""), now, out)


def on_learner_lost(state: State, event: LearnerLost, now: float, out: list[Action]) -> None:
    """A learner that is lost again and again on the same step will not get past it."""
    learner = state.learner
    learner.incarnation = max(learner.incarnation, event.incarnation)
    if not learner.alive:
        return
    learner.alive = False
    disturb(state.freshness)
    state.learner_losses += 1
    limit = state.params.trainer_losses_max
    if limit and state.learner_losses >= limit:
        stop(
            state,
            f"the learner was lost {state.learner_losses} times in step {state.committed}; "
            f"the last time: {event.reason}",
            out,
        )


def on_learner_report(state: State, event: LearnerReport, now: float, out: list[Action]) -> None:
    if event.progress != state.learner.progress:
        state.learner.progress = event.progress
        state.learner.progress_s = now


def on_tick(state: State, event: Tick, now: float, out: list[Action]) -> None:
    """Break the waits that made no progress, and rebalance when the period has passed."""
    for heap in (state.deadlines, state.old_deadlines):
        while heap and heap[0][0] <= now and state.has_room(out):
            _, _, kind, key = heapq.heappop(heap)
            _expire(state, kind, key, now, out)
    renew_deadlines(state)
    if now - state.rebalanced_s >= state.params.rebalance_period_s and len(state.versions) > 1:
        state.rebalance_wanted = True


def _expire(state: State, kind: str, key: str, now: float, out: list[Action]) -> None:
    """This wait is over, or begins anew because there was progress."""
    limits = state.params.deadlines
    match watched(state, kind, key):
        case Request() as request if kind == SCORE:
            # As long as the rewards answer, a question may just lie in their queue.
            if now < state.scored_s + limits.score_s:
                watch(state, SCORE, request, state.scored_s)
            else:
                retry_score(state, request, "the reward did not answer in time", now, out)
        case Request() as request:
            places = (request.dest, request.instance)
            _retry_moving(state, request, places, "move made no progress", out)
        case Instance() as inst if kind == INSTANCE:
            if now >= inst.reported_s + limits.report_s:  # the sum that was watched
                _replace_instance(state, inst, f"no report for {now - inst.reported_s:.0f} s", out)
            else:
                watch(state, INSTANCE, inst, inst.reported_s)
        case Instance(loading=int(version)) as inst:
            on_load_failed(state, LoadFailed(inst.id, version, "no progress"), now, out)
        case Learner(alive=True) as learner:
            silent_s = now - learner.progress_s
            if state.is_training and silent_s >= limits.trainer_s:
                reason = f"no progress for {silent_s:.0f} s"
                out.append(RestartLearner(reason))
                on_learner_lost(state, LearnerLost(reason), now, out)
            else:
                watch(state, LEARNER, learner, now)
        case _:
            pass
