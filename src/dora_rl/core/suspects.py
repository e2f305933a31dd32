"""Who killed the instance? Requests that are lost with it are tried alone before one is blamed.

Attempts count lack of progress, never length: whenever a request goes on with more tokens in its
journal than the time before (`Continued`), everything held against it is forgotten. So an instance
that lives for a minute costs a response of five minutes four continuations and no attempt.

    loss 1..losses_max   nobody is charged; who gained nothing in any of them becomes a suspect
    suspect              runs alone: an instance that holds its version is emptied for it, one
                         suspect at a time; the others are moved or parked and keep their tokens
    cleared              it gained `clear_tokens` alone (more after every wrong clearing), or ended
    loss while alone     charged; after `attempts_max` of them its group fails and its prompt is
                         set aside

A prompt that kills is found after losses_max + attempts_max losses: it never gains anything, so it
is a suspect after the first ones, and the same suspect is tried until it is cleared or found. No
other request fails for it: only a suspect that was alone is charged. A suspect avoids the instance
it was lost on where another holds its version, so a bad host does not make a bad prompt.
"""

from __future__ import annotations

import heapq

from dora_rl.core.actions import Action, Dispatch
from dora_rl.core.events import Continued
from dora_rl.core.ledger import fail_group, stop, stop_generating
from dora_rl.core.placement import (
    again,
    attach,
    best_holder,
    queue,
    relocate,
    stop_isolating,
    touch,
    unqueue,
)
from dora_rl.core.state import GENERATING, Instance, Live, Phase, Request, State
from dora_rl.types import InstanceId


def on_continued(state: State, event: Continued, now: float, out: list[Action]) -> None:
    """The journal says how far it had come: further than before is progress, however late we
    hear of it."""
    request = state.request(event.request)
    if request is None or request.phase not in GENERATING or event.num_tokens <= request.kept:
        return
    if not state.params.losses_max:
        return
    request.kept = event.num_tokens
    request.attempts = request.losses = request.alone_losses = request.clearings = 0
    state.instance_losses = 0
    if request.suspect:
        _trust(state, request, now, out)


def lost_with(state: State, inst: Instance, request: Request, why: str, out: list[Action]) -> None:
    """The instance is lost and this request with it: charge it, suspect it, or neither."""
    params = state.params
    request.lost_on = inst.id
    if request.suspect and request.phase is Phase.RUNNING:
        request.losses += 1
        request.alone_losses += 1
        if request.alone_losses >= params.attempts_max:
            _convict(state, request, why, out)
            return
    elif request.phase is not Phase.PENDING:  # what is parked does nothing
        request.losses += 1
        request.suspect = request.losses >= params.losses_max
    again(state, request)


def _convict(state: State, request: Request, why: str, out: list[Action]) -> None:
    group, losses = state.groups[request.id.group], request.alone_losses
    stop_generating(state, request)
    request.phase = Phase.FAILED
    group.num_failed += 1
    reason = f"{losses} instances were lost while sample {request.id.sample} ran alone; {why}"
    state.instance_losses = 0  # a finding is progress
    fail_group(state, group, reason, out, kills=True)


def count_loss(state: State, name: InstanceId, why: str, out: list[Action]) -> None:
    """Instances that are lost at work, one after the other, while nothing is gained: no use."""
    limit = state.params.instance_losses_max
    state.instance_losses += 1
    if limit and state.instance_losses >= limit:
        stop(
            state,
            f"{state.instance_losses} instances in a row were lost before a request had gained a "
            f"token; the last one, {name}: {why}",
            out,
        )


def see_suspect(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    """After a report: has the suspect that is tried here got far enough?"""
    for rid in inst.requests if inst.isolating is not None else ():
        request = state.request(rid)
        if request is None or not request.suspect or request.phase is not Phase.RUNNING:
            continue
        needed = state.params.clear_tokens << request.clearings
        if inst.decode_steps - request.mark >= needed:
            request.clearings += 1
            request.losses = state.params.losses_max - 1  # until its journal says it has gained
            _trust(state, request, now, out)
            return


def _trust(state: State, request: Request, now: float, out: list[Action]) -> None:
    """It may run with others again: here, unless another suspect waits for this instance."""
    request.suspect = False
    if request.phase is Phase.PENDING:  # from the suspects' queue to that of the others
        unqueue(state, request)
        queue(state, request, None, first=True)
    inst = state.instances.get(request.instance or "")
    if inst is None or inst.isolating is None or request.phase is not Phase.RUNNING:
        return
    if _next_suspect(state, state.versions[inst.isolating]) is None:
        stop_isolating(state, inst)
    else:
        _empty(state, inst, now, out)


def _empty(state: State, inst: Instance, now: float, out: list[Action]) -> None:
    for version in list(inst.held):
        if version in state.versions:
            relocate(state, inst, version, now, out)


def _next_suspect(state: State, live: Live) -> Request | None:
    """The first suspect that still waits."""
    while live.suspects:
        request = state.request(live.suspects[0])
        here = request is not None and request.version == live.version
        if request is not None and here and request.suspect and request.phase is Phase.PENDING:
            return request
        live.suspects.popleft()
    return None


def isolate(state: State, live: Live, now: float, out: list[Action]) -> None:
    """Go on with the trial of this version's suspects, if there are any."""
    suspect = _next_suspect(state, live)
    inst = state.instances.get(live.isolation or "")
    if inst is not None and not (inst.awake and inst.id in live.holders):
        stop_isolating(state, inst)  # it gives the version up, or sleeps
        inst = None
    if inst is None:
        inst = _place_of_trial(state, live, suspect) if suspect is not None else None
        if inst is None:
            return
        live.isolation, inst.isolating = inst.id, live.version
        _empty(state, inst, now, out)
    if inst.load:
        return  # somebody is on the way out, or the suspect runs
    if suspect is None:
        stop_isolating(state, inst)
        return
    live.suspects.popleft()
    unqueue(state, suspect)
    attach(state, suspect, inst)
    group, (_, sample) = state.groups[suspect.id.group], suspect.id
    out.append(
        Dispatch(
            inst.id, group.id, group.prompt, live.version, (sample,), (suspect.epoch,), resume=True
        )
    )


def _place_of_trial(state: State, live: Live, suspect: Request) -> Instance | None:
    """The least-loaded holder, and not the one it was lost on where another holds the version."""
    first = best_holder(state, live)
    if first is None or first.id != suspect.lost_on:
        return first
    heapq.heappop(live.heap)
    other = best_holder(state, live)
    touch(state, first)
    return other or (first if len(live.holders) == 1 else None)
