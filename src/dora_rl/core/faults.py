"""Joining, losing, deadlines, resume: whatever happens, no request is lost and none done twice.

A lost request goes back to the queue of its own version with a higher epoch and continues from
its token journal. What the lost party may still say carries the old epoch and is ignored.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from dora_rl.core.actions import Abort, Action, InForce, OptimizerRewound, Restart, RestartTrainer
from dora_rl.core.batching import adopt_target, end_durable, on_accepted, on_committed
from dora_rl.core.deadlines import (
    INSTANCE,
    MOVE,
    SCORE,
    TRAINER,
    watch_instance,
    watch_score,
    watch_trainer,
)
from dora_rl.core.elastic import training_now
from dora_rl.core.events import (
    InstanceJoined,
    InstanceReport,
    LoadFailed,
    Moved,
    MoveFailed,
    Resumed,
    TrainerJoined,
    TrainerReport,
)
from dora_rl.core.incarnations import forget_all
from dora_rl.core.ledger import ask_score, current, retry, score_again, scoring, stop
from dora_rl.core.orchestrate import pump
from dora_rl.core.params import Params
from dora_rl.core.placement import (
    attach,
    best_holder,
    end_move,
    park,
    pressured,
    queue,
    relocate,
    start_move,
    stop_isolating,
    touch,
)
from dora_rl.core.state import GENERATING, Held, Instance, Live, Phase, Request, State
from dora_rl.core.suspects import count_loss, lost_with, see_suspects
from dora_rl.types import InstanceId, Mode, RequestId, UserError

DEADLINES_MIN = 1024  # so many are kept whether or not they are met
FORGET_PER_EVENT = 8


def on_joined(state: State, event: InstanceJoined, now: float, out: list[Action]) -> None:
    # Whatever an earlier incarnation of it had continues elsewhere.
    lose_instance(state, event.instance, out, reason="it joined anew")
    inst = Instance(
        event.instance,
        state.next_instance,
        event.slots_max,
        event.resident_max,
        event.kv_tokens_max,
        event.elastic,
        event.life,
        awake=not (event.elastic and training_now(state)),
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
    touch(state, inst)
    watch_instance(state, inst)
    state.stirred[inst.id] = None
    state.rebalance_wanted = True


def lose_instance(
    state: State,
    name: InstanceId,
    out: list[Action],
    *,
    reason: str = "",
    blame: bool = True,
) -> None:
    """Forget an instance; everything it had continues elsewhere from the journal."""
    inst = state.instances.get(name)
    if inst is None:
        return
    why = f"instance {name} was lost" + (f": {reason}" if reason else "")
    had_work, company = inst.load > 0 or inst.loading is not None, inst.load
    lost = [*inst.requests, *inst.incoming, *inst.parked]
    for rid in lost:
        request = state.request(rid)
        if request is None or request.phase not in GENERATING:
            continue  # its group failed together with an earlier one of this list
        if request.phase is Phase.MOVING:
            other = request.dest if request.instance == name else request.instance
            if other is not None and other != name:
                out.append(Abort(other, rid, request.epoch))
        if blame and state.params.losses_max:
            lost_with(state, request, company, why, out)
        else:
            retry(state, request, f"instance {name} was lost", out, blame=blame)
    if inst.isolating is not None:
        stop_isolating(state, inst)
    for version in inst.held:
        if version in state.versions:
            state.versions[version].holders.pop(name, None)
            state.versions[version].leavers.pop(name, None)
    for live in state.versions.values():
        live.coming.pop(name, None)
    if inst.awake:
        state.slots_awake -= inst.slots_max
    state.num_elastic -= inst.elastic
    state.drowsy.pop(name, None)
    state.waking.pop(name, None)
    if not state.instance_losses:
        state.losses_among = len(state.instances)
    del state.instances[name]
    state.rebalance_wanted = True
    if blame and had_work:
        count_loss(state, name, reason or "no reason was given", out)


def on_report(state: State, event: InstanceReport, now: float, out: list[Action]) -> None:
    inst = state.instances.get(event.instance)
    if inst is None:
        return
    was_pressured, speed = pressured(state, inst), inst.speed
    inst.reported_s = now
    grew = event.decode_steps != inst.decode_steps
    inst.decode_steps = event.decode_steps
    inst.kv_tokens = event.kv_tokens
    inst.speed = event.speed
    see_suspects(state, inst, now, out)
    if _stands_still(state, inst, event, grew=grew, now=now, out=out):
        return
    if pressured(state, inst):
        _relieve(state, inst, now, out)
    elif was_pressured or speed != inst.speed:
        touch(state, inst)


def _stands_still(
    state: State,
    inst: Instance,
    event: InstanceReport,
    *,
    grew: bool,
    now: float,
    out: list[Action],
) -> bool:
    """Break the waits for tokens that do not come. True: the whole instance was given up.

    A request between two turns waits for its environment, which has a deadline of its own.
    """
    limit_s = state.params.deadlines.progress_s
    running = sum(held.num for held in inst.held.values())
    if grew or not inst.awake or running <= event.num_waiting:
        inst.progress_s = now
    if not limit_s:
        return False
    if now - inst.progress_s >= limit_s:
        reason = f"it reports {running} requests and no token for {now - inst.progress_s:.0f} s"
        out.append(Restart(inst.id, reason))
        lose_instance(state, inst.id, out, reason=reason)
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
    excess = inst.kv_tokens - int(state.params.kv_low * inst.kv_tokens_max)
    for rid in reversed(list(inst.requests)):
        if excess <= 0 or len(inst.requests) <= 1:
            break
        request = state.request(rid)
        if request is None or request.phase is not Phase.RUNNING:
            continue
        excess -= state.length_of(request)
        live = state.versions[request.version]
        peer = None if state.params.mode is Mode.PARTIAL else best_holder(state, live)
        if peer is not None and peer.id != inst.id and _has_kv_room(state, peer):
            start_move(state, request, peer, now, out)
        else:
            park(state, request, out)
    state.rebalance_wanted = True


def _has_kv_room(state: State, inst: Instance) -> bool:
    return inst.kv_tokens_max == 0 or inst.kv_tokens < state.params.kv_low * inst.kv_tokens_max


def on_load_failed(state: State, event: LoadFailed, now: float, out: list[Action]) -> None:
    inst = state.instances.get(event.instance)
    if inst is None or inst.loading != event.version:
        return
    if event.attempt not in (-1, inst.num_loads):
        return
    inst.loading = None
    inst.load_failures += 1
    live = state.versions.get(event.version)
    if live is not None and inst.donor is None and _never_loads(state, live, event, out):
        live.coming.pop(inst.id, None)
        return
    if inst.load_failures >= state.params.attempts_max:
        reason = f"version {event.version} did not load: {event.reason}"
        out.append(Restart(inst.id, reason))
        lose_instance(state, inst.id, out, reason=reason)
        return
    if live is not None and event.version not in inst.wants:
        inst.wants.insert(0, event.version)
        live.coming[inst.id] = None
    pump(state, inst, now, out)


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


def on_moved(state: State, event: Moved, now: float, out: list[Action]) -> None:
    request = _moving(state, event)
    if request is None:
        return
    dst = state.instances[event.dst]
    end_move(state, request)
    request.base_tokens = event.num_tokens
    attach(state, request, dst)
    if request.version in dst.leaving or not dst.awake or dst.isolating is not None:
        # That was decided while it was on its way.
        relocate(state, dst, request.version, now, out)


def on_move_failed(state: State, event: MoveFailed, now: float, out: list[Action]) -> None:
    request = _moving(state, event)
    if request is None:
        return
    src = state.instances.get(event.src)
    if not event.kept or src is None:
        out.append(Abort(event.dst, request.id, request.epoch))
        retry(state, request, f"move failed: {event.reason}", out, blame=_moves_count(state))
        return
    was_parked = request.id in src.parked
    end_move(state, request)
    if was_parked:
        queue(state, request, src, first=True)
        return
    attach(state, request, src)
    if request.version in src.leaving or not src.awake or src.isolating is not None:
        park(state, request, out)


def on_trainer_joined(state: State, event: TrainerJoined, now: float, out: list[Action]) -> None:
    """A learner at the newest sealed version; what was fed and not committed is fed again."""
    batch = state.batches.get(state.committed)
    sealed_unlogged = event.version == state.committed + 1
    assert event.version == state.committed or (sealed_unlogged and batch and batch.closed), (
        f"the learner holds version {event.version}, the log ends at {state.committed}"
    )
    state.on_disk = max(state.on_disk, event.durable)
    end_durable(state, out)
    state.trainer.alive = True
    state.trainer.progress = -1
    state.trainer.progress_s = now
    watch_trainer(state, now)
    if event.optimizer_version != event.version:
        out.append(OptimizerRewound(event.version, event.optimizer_version))
    for fed in state.batches.values():
        fed.num_fed = 0
        fed.close_sent = False
    if sealed_unlogged and batch is not None:
        batch.close_sent = True
        on_accepted(state, state.committed, out)
        on_committed(state, state.committed, now, out)


def on_trainer_lost(state: State, reason: str, out: list[Action]) -> None:
    """A learner that is lost again and again on the same step will not get past it."""
    if not state.trainer.alive:
        return
    state.trainer.alive = False
    state.trainer_losses += 1
    limit = state.params.trainer_losses_max
    if limit and state.trainer_losses >= limit:
        stop(
            state,
            f"the learner was lost {state.trainer_losses} times in step {state.committed}; "
            f"the last time: {reason}",
            out,
        )


def on_trainer_report(state: State, event: TrainerReport, now: float) -> None:
    if event.progress != state.trainer.progress:
        state.trainer.progress = event.progress
        state.trainer.progress_s = now


def on_tick(state: State, now: float, out: list[Action]) -> None:
    """Break the waits that made no progress, and rebalance when the period has passed."""
    for heap in (state.deadlines, state.old_deadlines):
        while heap and heap[0][0] <= now and state.has_room(out):
            _, _, kind, key = heapq.heappop(heap)
            _expire(state, kind, key, now, out)
    in_flight = len(state.groups) * state.params.group_size + 2 * len(state.instances)
    if not state.old_deadlines and len(state.deadlines) > DEADLINES_MIN + 2 * in_flight:
        state.old_deadlines, state.deadlines = state.deadlines, []
    if now - state.rebalanced_s >= state.params.rebalance_period_s and len(state.versions) > 1:
        state.rebalance_wanted = True


def forget_met(state: State) -> None:
    """Most waits end long before their deadline; what is left of them must not pile up.

    A few are looked at with every event, more than an event adds on average. They are taken from
    the end of the list, which leaves it a heap.
    """
    for _ in range(min(FORGET_PER_EVENT, len(state.old_deadlines))):
        entry = state.old_deadlines.pop()
        if _is_open(state, *entry[2:]):
            heapq.heappush(state.deadlines, entry)


def _is_open(state: State, kind: str, key: str) -> bool:
    if kind in (MOVE, SCORE):
        return _request_of(state, kind, key) is not None
    return kind == TRAINER or _instance_of(state, kind, key) is not None


def _request_of(state: State, kind: str, key: str) -> Request | None:
    """The request whose move or score this deadline is about, if that is still waited for."""
    group, sample, number, *dst = key.split("/", 3)
    rid = RequestId(int(group), int(sample))
    if kind == SCORE:
        return scoring(state, rid, int(number))
    request = current(state, rid, int(number))
    moving = request is not None and request.phase is Phase.MOVING and [request.dest] == dst
    return request if moving else None


def _instance_of(state: State, kind: str, key: str) -> Instance | None:
    """The instance whose report or load this deadline is about, in the life it had then."""
    index, *load, name = key.split("/", 1 if kind == INSTANCE else 3)
    inst = state.instances.get(name)
    if inst is None or inst.index != int(index):
        return None
    return inst if load in ([], [str(inst.loading), str(inst.load_failures)]) else None


def _expire(state: State, kind: str, key: str, now: float, out: list[Action]) -> None:
    if kind == TRAINER:
        _expire_trainer(state, now, out)
    elif kind in (MOVE, SCORE):
        request = _request_of(state, kind, key)
        if request is not None and kind == SCORE:
            _expire_score(state, request, now, out)
        elif request is not None:
            _expire_move(state, request, out)
    else:
        inst = _instance_of(state, kind, key)
        if inst is not None and kind == INSTANCE:
            _expire_instance(state, inst, now, out)
        elif inst is not None and inst.loading is not None:
            on_load_failed(state, LoadFailed(inst.id, inst.loading, "no progress"), now, out)


def _moves_count(state: State) -> bool:
    """A move that fails is not the request's fault, and its length is what makes it move."""
    return not state.params.losses_max


def _expire_score(state: State, request: Request, now: float, out: list[Action]) -> None:
    """As long as the rewards answer, a question may just lie in their queue."""
    if now < state.scored_s + state.params.deadlines.score_s:
        watch_score(state, request, state.scored_s)
    else:
        score_again(state, request, "the reward did not answer in time", now, out)


def _expire_move(state: State, request: Request, out: list[Action]) -> None:
    for name in (request.dest, request.instance):
        if name is not None:
            out.append(Abort(name, request.id, request.epoch))
    retry(state, request, "move made no progress", out, blame=_moves_count(state))


def _expire_instance(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    if now >= inst.reported_s + state.params.deadlines.report_s:  # the sum that was watched
        reason = f"no report for {now - inst.reported_s:.0f} s"
        out.append(Restart(inst.id, reason))
        lose_instance(state, inst.id, out, reason=reason)
    else:
        watch_instance(state, inst)


def _expire_trainer(state: State, now: float, out: list[Action]) -> None:
    if not state.trainer.alive:
        return
    limit = state.params.deadlines.trainer_s
    if training_now(state) and now - state.trainer.progress_s >= limit:
        reason = f"no progress for {now - state.trainer.progress_s:.0f} s"
        out.append(RestartTrainer(reason))
        on_trainer_lost(state, reason, out)
    else:
        watch_trainer(state, now)


def _check_num_steps(state: State, params: Params) -> None:
    """Fewer steps than before are fine as long as every issued group still finds a place."""
    if params.num_steps >= state.params.num_steps or not state.policy.keeps_bound:
        return
    if replace(state.bound, last=params.num_steps - 1).holds(state.untaken):
        return
    size = state.params.batch_groups
    taken = size - state.bound.free  # of the step that is filling
    left = taken + sum(count for _, count in state.untaken)
    least = state.filling + -(-left // size)
    raise UserError(
        f"num_steps = {params.num_steps} is too few: the groups that were already issued need "
        f"{least} steps"
    )


def on_resumed(state: State, event: Resumed, now: float, out: list[Action]) -> None:
    """The controller is back: all workers are new, groups and batches are as they were."""
    event.params.validate()
    if event.params.mode is not state.params.mode:
        was = state.params.mode.value
        raise UserError(f"mode = {event.params.mode.value}: this run is {was}; start a new run")
    if event.params.group_size != state.params.group_size:
        raise UserError(
            f"group_size = {event.params.group_size}: the groups of this run have "
            f"{state.params.group_size} samples; start a new run"
        )
    _check_num_steps(state, event.params)
    for name in list(state.instances):
        lose_instance(state, name, out, blame=False)
    state.trainer.alive = False
    state.trainer_losses = state.instance_losses = 0
    state.failed_prompts = state.judged_prompts = 0
    state.scored_s = -1.0e9
    for live in state.versions.values():
        live.load_failures = 0
    forget_all(state)
    state.stopped = None
    state.filtered_streak = 0
    state.deadlines.clear()
    state.old_deadlines.clear()
    state.rebalanced_s = -1.0e9
    for group in list(state.groups.values()):
        for request in group.requests:
            if request.phase is Phase.SCORING:
                request.score_attempts += 1
                ask_score(state, request, now, out)
    old = state.params
    # What a step's batch is made with changes between two steps, everything else at once.
    as_before = replace(
        event.params,
        max_staleness=old.max_staleness,
        batch_groups=old.batch_groups,
        updates_per_step=old.updates_per_step,
    )
    changed = as_before != event.params
    if not old.durable_behind:
        state.on_disk = state.committed  # a release that wrote to the disk first
    state.put_in_force(as_before)
    state.target = event.params if changed else None
    end_durable(state, out)
    if state.stopped is not None:
        return
    if changed:
        adopt_target(state, out)
    else:
        out.append(InForce(state.filling, state.policy.max_staleness, old.batch_groups))
