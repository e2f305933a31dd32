"""`step(state, event, now) -> actions`: the only door into the core.

Each event has one handler; after it the same chain of decisions runs, in this order, because new
groups are admitted first and the partition follows them. One event causes a limited number of
actions; what is left over is found again by the next event, because it is in the state:

    take ready groups -> feed the learner -> admit -> give out free slots -> assign idle
    instances -> rebalance

Every worker has a name for the whole run and an incarnation for each of its starts. The core
remembers the newest of each name that has joined or was lost, which only grows: what an earlier one
said late, or twice, is not believed, and an instance that is gone cannot come back by a message
that was under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dora_rl.core import batching, events, faults, ledger, orchestrate, resume, suspects
from dora_rl.core.actions import Action, InForce
from dora_rl.core.admission import admit
from dora_rl.core.events import Event
from dora_rl.core.params import Params
from dora_rl.core.placement import dispatch_pending
from dora_rl.core.state import State
from dora_rl.core.waits import forget_met

FREED_PER_EVENT = 64  # groups that have ended


def _on_started(state: State, event: events.Started, now: float, out: list[Action]) -> None:
    assert event.params == state.params, "Started must carry the params of the state"
    out.append(InForce(0, state.policy.max_staleness, state.params.batch_groups))


def _on_recomputed(state: State, event: events.Recomputed, now: float, out: list[Action]) -> None:
    """For whoever reads the log; nothing is decided by it."""


HANDLERS: dict[type[Event], Callable[[State, Any, float, list[Action]], None]] = {
    events.Started: _on_started,
    events.Resumed: resume.on_resumed,
    events.Rewound: resume.on_rewound,
    events.InstanceJoined: faults.on_joined,
    events.InstanceLost: faults.on_lost,
    events.InstanceReport: faults.on_report,
    events.Loaded: orchestrate.on_loaded,
    events.LoadFailed: faults.on_load_failed,
    events.SampleFinished: ledger.on_finished,
    events.SampleFailed: ledger.on_sample_failed,
    events.Continued: suspects.on_continued,
    events.Moved: faults.on_moved,
    events.MoveFailed: faults.on_move_failed,
    events.Scored: ledger.on_scored,
    events.ScoreFailed: ledger.on_score_failed,
    events.Recomputed: _on_recomputed,
    events.BatchAccepted: batching.on_accepted,
    events.StepCommitted: batching.on_committed,
    events.VersionDurable: batching.on_durable,
    events.LearnerJoined: faults.on_learner_joined,
    events.LearnerLost: faults.on_learner_lost,
    events.LearnerReport: faults.on_learner_report,
    events.Tick: faults.on_tick,
    events.StopRequested: ledger.on_stop_requested,
}


def initial(params: Params) -> State:
    """The state before the first event (which must be `Started` with the same params)."""
    params.validate()
    return State(params)


def step(state: State, event: Event, now: float) -> list[Action]:
    """Take one event in, give the actions it calls for."""
    out: list[Action] = []
    if state.stopped is not None and not isinstance(event, events.Resumed):
        return out
    if not is_late(state, event):
        HANDLERS[type(event)](state, event, now, out)
    if state.old_deadlines:
        forget_met(state)
    del state.ended[-FREED_PER_EVENT:]
    if state.stopped is None:
        _decide(state, now, out)
    return out


def is_late(state: State, event: Event) -> bool:
    """Whether it comes from another incarnation of its worker than the one that is known.

    A join and a loss may also come from a newer one, which is the one that is known from then on.
    A loss may overtake the join, which is late then.
    """
    match event:
        case (
            events.SampleFinished(instance=name)
            | events.InstanceReport(instance=name)
            | events.Loaded(instance=name)
            | events.SampleFailed(instance=name)
            | events.LoadFailed(instance=name)
            | events.Moved(dst=name)
            | events.MoveFailed(src=name)
        ):
            return event.incarnation not in (-1, state.incarnations.get(name, -1))
        case (
            events.BatchAccepted()
            | events.StepCommitted()
            | events.VersionDurable()
            | events.LearnerReport()
        ):
            return event.incarnation not in (-1, state.learner.incarnation)
        case events.InstanceJoined():
            return event.life <= state.incarnations.get(event.instance, -1)
        case events.InstanceLost():
            return 0 <= event.incarnation < state.incarnations.get(event.instance, -1)
        case events.LearnerJoined():
            return 0 <= event.incarnation <= state.learner.incarnation
        case events.LearnerLost():
            return 0 <= event.incarnation < state.learner.incarnation
        case _:
            return False


def _decide(state: State, now: float, out: list[Action]) -> None:
    if state.num_ready:
        batching.take(state, now, out)
    batching.feed(state, now, out)
    if state.to_sleep or state.to_wake:
        orchestrate.sleep_and_wake(state, now, out)
    all_admitted = admit(state, now, out)
    _dispatch_all(state, now, out)
    if state.retiring:
        orchestrate.retire_finished(state, out)
    if state.maybe_idle or state.flips or state.newest_due or state.partition_due:
        orchestrate.continue_rebalance(state, now, out)
    has_room = len(out) <= state.params.event_actions_max // 2
    if all_admitted and has_room and _rebalance_due(state, now):
        orchestrate.rebalance(state, now, out)
        _dispatch_all(state, now, out)


def _dispatch_all(state: State, now: float, out: list[Action]) -> None:
    for live in list(state.versions.values()):
        if live.suspects or live.isolation is not None:
            suspects.isolate(state, live, now, out)
        if live.num_pending:
            dispatch_pending(state, live, now, out)


def _rebalance_due(state: State, now: float) -> bool:
    wanted = state.rebalance_wanted
    for live in state.versions.values():
        if live.num_pending and not live.coming:
            # Nobody will serve it, or enough is waiting to fill a whole instance.
            enough = live.num_pending * len(state.instances) >= state.slots_awake > 0
            wanted = wanted or not live.holders or enough
    return wanted and now - state.rebalanced_s >= state.params.rebalance_min_s
