"""Every wait has a deadline, which measures lack of progress, and a name.

Deadlines are a heap of moments at which progress is looked for. An entry names what is waited for;
when its moment comes, the handler in `faults` looks whether there was progress since, and either
sets a new moment or breaks the wait. The names, `waits`, are read from the state on demand.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dora_rl.core.state import GroupPhase, Instance, Learner, Phase, Request, State
from dora_rl.types import RequestId

INSTANCE, LOAD, MOVE, SCORE = "instance", "load", "move", "score"
LEARNER = "trainer"  # as snapshots have it
DEADLINES_MIN = 1024  # so many are kept whether or not they are met
FORGET_PER_EVENT = 8


# Of each kind: the field of `Deadlines` that limits it, and what tells one wait from another. The
# index of an instance tells its starts apart.
_KINDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    INSTANCE: ("report_s", lambda inst: f"{inst.index}/{inst.id}"),
    LOAD: ("load_s", lambda i: f"{i.index}/{i.loading}/{i.load_failures}/{i.id}"),
    MOVE: ("move_s", lambda r: f"{r.id.group}/{r.id.sample}/{r.epoch}/{r.dest}"),
    SCORE: ("score_s", lambda r: f"{r.id.group}/{r.id.sample}/{r.score_attempts}"),
    LEARNER: ("trainer_s", lambda learner: str(learner.progress)),
}


def watch(state: State, kind: str, whom: Instance | Request | Learner, since_s: float) -> None:
    """Look whether there was progress when the deadline of such a wait has passed."""
    limit, key_of = _KINDS[kind]
    at = since_s + getattr(state.params.deadlines, limit)
    heapq.heappush(state.deadlines, (at, state.next_deadline, kind, key_of(whom)))
    state.next_deadline += 1


def watched(state: State, kind: str, key: str) -> Instance | Request | Learner | None:
    """Whom this deadline is about, if it is still waited for. A learner always is."""
    if kind in (SCORE, MOVE):
        group, sample, _ = key.split("/", 2)
        found = state.request(RequestId(int(group), int(sample)))
        if found is None or found.phase is not (Phase.SCORING if kind == SCORE else Phase.MOVING):
            return None
    elif kind == LEARNER:
        return state.learner
    else:
        found = state.instances.get(key.split("/", 1 if kind == INSTANCE else 3)[-1])
    return found if found is not None and _KINDS[kind][1](found) == key else None


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
        if watched(state, kind, key) is not None:
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
            found.append(
                Wait(
                    f"requests of version {live.version}",
                    f"a suspect that is tried alone on {live.isolation}",
                )
            )
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
