"""`step(state, event, now) -> actions`: the only door into the core.

Each event has one handler; after it the same chain of decisions runs, in this order, because new
groups are admitted first and the partition follows them. One event causes a limited number of
actions; what is left over is found again by the next event, because it is in the state:

    take ready groups -> feed the learner -> admit -> give out free slots -> employ idle
    instances -> rebalance
"""

from __future__ import annotations

from dora_rl.core import batching, elastic, faults, ledger, orchestrate, rewind, suspects
from dora_rl.core.actions import Action, InForce
from dora_rl.core.admission import admit
from dora_rl.core.events import (
    BatchAccepted,
    Continued,
    Event,
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    Loaded,
    LoadFailed,
    Moved,
    MoveFailed,
    Recomputed,
    Resumed,
    Rewound,
    SampleFailed,
    SampleFinished,
    Scored,
    ScoreFailed,
    Started,
    StepCommitted,
    StopRequested,
    Tick,
    TrainerJoined,
    TrainerLost,
    TrainerReport,
    VersionDurable,
)
from dora_rl.core.incarnations import is_late, note
from dora_rl.core.params import Params
from dora_rl.core.placement import fill
from dora_rl.core.state import State

FREED_PER_EVENT = 64  # groups that have ended


def initial(params: Params) -> State:
    """The state before the first event (which must be `Started` with the same params)."""
    params.validate()
    return State(params)


def step(state: State, event: Event, now: float) -> list[Action]:
    """Take one event in, give the actions it calls for."""
    out: list[Action] = []
    if state.stopped is not None and not isinstance(event, Resumed):
        return out
    if not is_late(state, event):
        _handle(state, event, now, out)
    if state.old_deadlines:
        faults.forget_met(state)
    del state.ended[-FREED_PER_EVENT:]
    if state.stopped is None:
        _decide(state, now, out)
    return out


def _decide(state: State, now: float, out: list[Action]) -> None:
    if state.num_ready:
        batching.take(state, now, out)
    batching.feed(state, now, out)
    if state.drowsy or state.waking:
        elastic.go_on(state, now, out)
    all_admitted = admit(state, out)
    _give_out(state, now, out)
    if state.retiring:
        orchestrate.retire_finished(state, out)
    if state.stirred or state.flips or state.seats or state.partition_due:
        orchestrate.carry_on(state, now, out)
    has_room = len(out) <= state.params.event_actions_max // 2
    if all_admitted and has_room and _rebalance_due(state, now):
        orchestrate.rebalance(state, now, out)
        _give_out(state, now, out)


def _give_out(state: State, now: float, out: list[Action]) -> None:
    for live in list(state.versions.values()):
        if live.suspects or live.isolation is not None:
            suspects.isolate(state, live, now, out)
        if live.num_pending:
            fill(state, live, now, out)


def _rebalance_due(state: State, now: float) -> bool:
    wanted = state.rebalance_wanted
    for live in state.versions.values():
        if live.num_pending and not live.coming:
            if not live.holders:
                wanted = True
            elif live.num_pending * len(state.instances) >= state.slots_awake > 0:
                wanted = True  # enough is waiting to fill a whole instance
    return wanted and now - state.rebalanced_s >= state.params.rebalance_min_s


def _handle(state: State, event: Event, now: float, out: list[Action]) -> None:
    match event:
        case SampleFinished():
            ledger.on_finished(state, event, now, out)
        case Scored():
            ledger.on_scored(state, event, now, out)
        case InstanceReport():
            faults.on_report(state, event, now, out)
        case Moved():
            faults.on_moved(state, event, now, out)
        case Loaded():
            inst = state.instances.get(event.instance)
            if inst is not None and event.attempt in (-1, inst.num_loads):
                orchestrate.on_loaded(state, inst, event.version, now, out)
        case Tick():
            faults.on_tick(state, now, out)
        case TrainerReport():
            faults.on_trainer_report(state, event, now)
        case BatchAccepted():
            batching.on_accepted(state, event.step, out)
        case StepCommitted():
            batching.on_committed(state, event.step, now, out)
        case VersionDurable():
            batching.on_durable(state, event.version, out)
        case _:
            _handle_rare(state, event, now, out)


def _handle_rare(state: State, event: Event, now: float, out: list[Action]) -> None:
    note(state, event)
    match event:
        case Continued():
            suspects.on_continued(state, event, now, out)
        case SampleFailed():
            ledger.on_sample_failed(state, event, now, out)
        case ScoreFailed():
            ledger.on_score_failed(state, event, now, out)
        case MoveFailed():
            faults.on_move_failed(state, event, now, out)
        case LoadFailed():
            faults.on_load_failed(state, event, now, out)
        case InstanceJoined():
            faults.on_joined(state, event, now, out)
        case InstanceLost():
            faults.lose_instance(state, event.instance, out, reason=event.reason)
        case TrainerJoined():
            faults.on_trainer_joined(state, event, now, out)
        case TrainerLost():
            faults.on_trainer_lost(state, event.reason, out)
        case StopRequested():
            ledger.stop(state, event.reason, out)
        case Recomputed():
            pass  # for whoever reads the log; nothing is decided by it
        case Resumed():
            faults.on_resumed(state, event, now, out)
        case Rewound():
            rewind.on_rewound(state, event.version, out)
        case Started():
            params = event.params
            assert params == state.params, "Started must carry the params of the state"
            out.append(InForce(0, state.policy.max_staleness, params.batch_groups))
        case _:
            raise AssertionError(f"no handler for {event!r}")
