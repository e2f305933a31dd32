"""Who killed the instance? Requests that are lost with it are tried alone before one is blamed.

Attempts count lack of progress, never length: whenever a request goes on with more tokens in its
journal than the time before (`Continued`), everything held against it is forgotten. So an instance
that lives for a minute costs a response of five minutes four continuations and no attempt.

    loss 1..losses_max   nobody is charged; who gained nothing in any of them becomes a suspect
    suspect              is tried: an instance that holds its version is emptied, and only suspects
                         run there; the others are moved or parked and keep their tokens. Few
                         suspects are tried one by one, many an eighth of them at a time
    cleared              it gained `clear_tokens` there (more after every wrong clearing), or ended
    loss in company      those who were tried together are tried again, half of them at a time
    loss while alone     charged; after `attempts_max` of them its group fails and its prompt is
                         set aside

A prompt that kills never gains anything, so it is a suspect after the first losses; n suspects are
halved at each further loss, and the same ones are tried until they are cleared or found. So it is
found after losses_max + log2 n + attempts_max losses. No other request fails for it: only a suspect
that was alone is charged. A suspect avoids the instance it was lost on where another holds its
version, so a bad host does not make a bad prompt. A loss of the whole fleet makes many suspects;
they are cleared a crowd at a time, and the rest of the world goes on beside them.
"""

from __future__ import annotations

import heapq

from dora_rl.core.actions import Action
from dora_rl.core.events import Continued
from dora_rl.core.ledger import fail_sample, stop
from dora_rl.core.placement import (
    attach,
    best_holder,
    dequeue,
    dispatch_of,
    drain,
    enqueue,
    next_waiting,
    reindex,
    requeue,
    stop_isolating,
)
from dora_rl.core.state import GENERATING, Instance, Live, Phase, Request, State
from dora_rl.types import InstanceId


def on_continued(state: State, event: Continued, now: float, out: list[Action]) -> None:
    """The journal says how far it had come: further than before is progress, however late we
    hear of it."""
    request = state.request(event.request)
    if request is None or request.phase not in GENERATING or not state.params.losses_max:
        return
    if event.num_tokens <= request.kept:
        return
    request.kept = event.num_tokens
    request.attempts = request.losses = request.alone_losses = 0
    request.clearings = request.crowd = 0
    state.instance_losses = 0
    if request.suspect:
        _clear(state, request, now, out)


def lost_with(state: State, request: Request, company: int, why: str, out: list[Action]) -> None:
    """Its instance is lost with all its company: charge this request, suspect it, or neither."""
    params = state.params
    request.lost_on = request.instance
    if request.phase is not Phase.PENDING:  # what is parked does nothing
        request.losses += 1
        if request.suspect and company == 1:
            request.alone_losses += 1
            if request.alone_losses >= params.attempts_max:
                state.instance_losses = 0  # a finding is progress
                alone = f"instances were lost while sample {request.id.sample} ran alone"
                fail_sample(
                    state, request, f"{request.alone_losses} {alone}; {why}", out, kills=True
                )
                return
        elif request.suspect:
            request.crowd = company // 2
        request.suspect = request.losses >= params.losses_max
    requeue(state, request)


def count_loss(state: State, name: InstanceId, why: str, out: list[Action]) -> None:
    """Instances that are lost at work, one after the other, while nothing is gained: no use."""
    limit = state.params.instance_losses_max
    state.instance_losses += 1
    if limit and state.instance_losses >= max(limit, 2 * state.losses_among):
        stop(
            state,
            f"{state.instance_losses} instances in a row were lost before a request had gained a "
            f"token; the last one, {name}: {why}",
            out,
        )


def check_suspects(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    """After a report: have the suspects that are tried here got far enough?"""
    if inst.isolating is None:
        return
    for request in state.running_on(inst):
        limit = state.params.clear_tokens << request.clearings
        if request.suspect and inst.decode_steps - request.mark >= limit:
            request.clearings += 1
            request.losses = state.params.losses_max - 1  # until its journal says it has gained
            _clear(state, request, now, out)


def _clear(state: State, request: Request, now: float, out: list[Action]) -> None:
    """It may run with others again: here, unless more suspects wait for this instance."""
    request.suspect = False
    if request.phase is Phase.PENDING:  # from the suspects' queue to that of the others
        dequeue(state, request)
        enqueue(state, request, None, first=True)
    inst = state.instances.get(request.instance or "")
    if inst is None or inst.isolating is None or any(r.suspect for r in state.running_on(inst)):
        return
    live = state.versions[inst.isolating]
    if next_waiting(state, live, live.suspects) is None:
        stop_isolating(state, inst)
    else:
        _drain_all(state, inst, now, out)


def _drain_all(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    for version in list(inst.held):
        if version in state.versions:
            drain(state, inst, version, now, out)


def isolate(state: State, live: Live, now: float, out: list[Action]) -> None:
    """Go on with the trial of this version's suspects, if there are any."""
    suspect = next_waiting(state, live, live.suspects)
    inst = state.instances.get(live.isolation or "")
    if inst is not None and not (inst.awake and inst.id in live.holders):
        stop_isolating(state, inst)  # it gives the version up, or sleeps
        inst = None
    if inst is None:
        inst = _trial_instance(state, live, suspect) if suspect is not None else None
        if inst is None:
            return
        live.isolation, inst.isolating = inst.id, live.version
        _drain_all(state, inst, now, out)
    if inst.load:
        return  # somebody is on the way out, or suspects are tried
    if suspect is None:
        stop_isolating(state, inst)
    else:
        _start_trial(state, live, inst, out)


def _start_trial(state: State, live: Live, inst: Instance, out: list[Action]) -> None:
    """Start the first suspects on the empty instance, as many as may be together."""
    room = min(inst.slots_max, max(1, len(live.suspects) // 8))
    while suspect := next_waiting(state, live, live.suspects):
        room = min(room, suspect.crowd or room)
        if inst.load >= room:
            return
        live.suspects.popleft()
        dequeue(state, suspect)
        attach(state, suspect, inst)
        out.append(dispatch_of(state, [suspect], inst))


def _trial_instance(state: State, live: Live, suspect: Request) -> Instance | None:
    """The least-loaded holder, and not the one it was lost on where another holds the version."""
    if (first := best_holder(state, live)) is None or first.id != suspect.lost_on:
        return first
    heapq.heappop(live.heap)
    other = best_holder(state, live)
    reindex(state, first)
    return other or (first if len(live.holders) == 1 else None)
