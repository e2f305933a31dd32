"""Every wait has a deadline and a name: a heap of moments at which progress is looked for.

An entry names what is waited for; when its moment comes, the handler in `faults` checks whether
there was progress since, and either sets a new moment or breaks the wait.
"""

from __future__ import annotations

import heapq

from dora_rl.core.state import Instance, Request, State

INSTANCE, LOAD, MOVE, SCORE, TRAINER = "instance", "load", "move", "score", "trainer"


def watch(state: State, at: float, kind: str, key: str) -> None:
    heapq.heappush(state.deadlines, (at, state.next_deadline, kind, key))
    state.next_deadline += 1


def watch_instance(state: State, inst: Instance) -> None:
    at = inst.reported_s + state.params.deadlines.report_s
    watch(state, at, INSTANCE, f"{inst.index}/{inst.id}")


def watch_load(state: State, inst: Instance, now: float) -> None:
    key = f"{inst.index}/{inst.loading}/{inst.load_failures}/{inst.id}"
    watch(state, now + state.params.deadlines.load_s, LOAD, key)


def watch_move(state: State, request: Request, now: float) -> None:
    key = f"{request.id.group}/{request.id.sample}/{request.epoch}/{request.dest}"
    watch(state, now + state.params.deadlines.move_s, MOVE, key)


def watch_score(state: State, request: Request, now: float) -> None:
    key = f"{request.id.group}/{request.id.sample}/{request.score_attempts}"
    watch(state, now + state.params.deadlines.score_s, SCORE, key)


def watch_trainer(state: State, now: float) -> None:
    watch(state, now + state.params.deadlines.trainer_s, TRAINER, str(state.trainer.progress))
