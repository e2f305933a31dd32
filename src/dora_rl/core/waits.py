"""Every wait has a deadline, which measures lack of progress, and a name.

Deadlines are a heap of moments at which progress is looked for. An entry names what is waited for;
when its moment comes, the handler in `faults` looks whether there was progress since, and either
sets a new moment or breaks the wait. The names, `waits`, are read from the state on demand.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from dora_rl.core.state import GroupPhase, Instance, Phase, Request, State
from dora_rl.types import RequestId

INSTANCE, LOAD, MOVE, SCORE = "instance", "load", "move", "score"
LEARNER = "trainer"  # as snapshots have it
DEADLINES_MIN = 1024  # so many are kept whether or not they are met
FORGET_PER_EVENT = 8


def _watch(state: State, at: float, kind: str, key: str) -> None:
    heapq.heappush(state.deadlines, (at, state.next_deadline, kind, key))
    state.next_deadline += 1


def watch_instance(state: State, inst: Instance) -> None:
    at = inst.reported_s + state.params.deadlines.report_s
    _watch(state, at, INSTANCE, _instance_key(INSTANCE, inst))


def watch_load(state: State, inst: Instance, now: float) -> None:
    _watch(state, now + state.params.deadlines.load_s, LOAD, _instance_key(LOAD, inst))


def watch_move(state: State, request: Request, now: float) -> None:
    _watch(state, now + state.params.deadlines.move_s, MOVE, _request_key(MOVE, request))


def watch_score(state: State, request: Request, now: float) -> None:
    _watch(state, now + state.params.deadlines.score_s, SCORE, _request_key(SCORE, request))


def watch_learner(state: State, now: float) -> None:
    _watch(state, now + state.params.deadlines.trainer_s, LEARNER, str(state.learner.progress))


def _request_key(kind: str, request: Request) -> str:
    group, sample = request.id
    if kind == SCORE:
        return f"{group}/{sample}/{request.score_attempts}"
    return f"{group}/{sample}/{request.epoch}/{request.dest}"


def _instance_key(kind: str, inst: Instance) -> str:
    """`index` tells the starts of an instance apart."""
    if kind == INSTANCE:
        return f"{inst.index}/{inst.id}"
    return f"{inst.index}/{inst.loading}/{inst.load_failures}/{inst.id}"


def request_of(state: State, kind: str, key: str) -> Request | None:
    """The request whose move or score this deadline is about, if that is still waited for."""
    group, sample, _ = key.split("/", 2)
    request = state.request(RequestId(int(group), int(sample)))
    phase = Phase.SCORING if kind == SCORE else Phase.MOVING
    if request is None or request.phase is not phase or _request_key(kind, request) != key:
        return None
    return request


def instance_of(state: State, kind: str, key: str) -> Instance | None:
    """The instance whose report or load this deadline is about, if that is still waited for."""
    inst = state.instances.get(key.split("/", 1 if kind == INSTANCE else 3)[-1])
    return inst if inst is not None and _instance_key(kind, inst) == key else None


def renew_deadlines(state: State) -> None:
    """Most waits end long before their deadline; what is left of them must not pile up."""
    in_flight = len(state.groups) * state.params.group_size + 2 * len(state.instances)
    if not state.old_deadlines and len(state.deadlines) > DEADLINES_MIN + 2 * in_flight:
        state.old_deadlines, state.deadlines = state.deadlines, []


def forget_met(state: State) -> None:
    """Look at a few old deadlines with every event, more than an event adds on average.

    They are taken from the end of the list, which leaves it a heap.
    """
    for _ in range(min(FORGET_PER_EVENT, len(state.old_deadlines))):
        entry = state.old_deadlines.pop()
        _, _, kind, key = entry
        find = request_of if kind in (MOVE, SCORE) else instance_of
        if kind == LEARNER or find(state, kind, key) is not None:
            heapq.heappush(state.deadlines, entry)


@dataclass(frozen=True, slots=True)
class Wait:
    who: str
    what: str


def waits(state: State) -> list[Wait]:
    """Every wait the run is in now, the learner's first. O(what is alive)."""
    found = [_learner_wait(state)]
    for inst in state.instances.values():
        if inst.loading is not None:
            source = inst.donor or "the store"
            found.append(Wait(inst.id, f"version {inst.loading} from {source}"))
        if not inst.awake:
            found.append(Wait(inst.id, "the learner to publish (asleep)"))
    for live in state.versions.values():
        if live.isolation is not None:
            who = f"requests of version {live.version}"
            found.append(Wait(who, f"a suspect that is tried alone on {live.isolation}"))
        if live.num_pending:
            where = f"{len(live.holders)} holding it, {len(live.coming)} loading it"
            what = f"a slot on version {live.version} ({where})"
            found.append(Wait(f"{live.num_pending} requests", what))
    return found


def _learner_wait(state: State) -> Wait:
    if not state.learner.alive:
        return Wait("controller", "a learner to join")
    if state.durable < state.committed >= state.params.num_steps:
        return Wait("the end of the run", f"version {state.committed} to be on disk")
    batch = state.batch
    if batch.closed:
        return Wait(f"step {batch.step}", f"the learner to finish step {state.committed}")
    missing = state.params.batch_groups - len(batch.groups)
    groups = state.groups.values()
    running = sum(group.phase in (GroupPhase.RUNNING, GroupPhase.ISSUED) for group in groups)
    scoring = sum(any(r.phase is Phase.SCORING for r in group.requests) for group in groups)
    text = f"{missing} more groups ({running} generating, {scoring} with rewards outstanding)"
    if state.waiting_for:
        oldest = ", ".join(map(str, state.waiting_for[:5]))
        text += f"; older groups come first: {oldest}"
    return Wait(f"step {batch.step}", text)
