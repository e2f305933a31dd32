"""The `partial` baseline: at each new version every running request continues on it.

C1 is given up here, explicitly: the request's version changes, its group keeps the version it was
admitted on (so the staleness bound still counts from its oldest token), and the engine records a
version segment when it continues.
"""

from __future__ import annotations

from dora_rl.core.actions import Action, Reversion
from dora_rl.core.placement import attach, detach, park, queue, unqueue
from dora_rl.core.state import GENERATING, Phase, Request, State


def reversion_all(state: State, now: float, out: list[Action]) -> None:
    """Move every generating request to the newest version."""
    for group in state.groups.values():
        for request in group.requests:
            if request.phase in GENERATING and request.version != state.newest:
                _reversion(state, request, out)


def _reversion(state: State, request: Request, out: list[Action]) -> None:
    assert request.phase is not Phase.MOVING, "partial never moves requests"
    newest = state.versions[state.newest]
    if request.phase is Phase.RUNNING:
        inst = state.instances[request.instance or ""]
        if newest.version in inst.held:
            detach(state, request)
            _recount(state, request)
            attach(state, request, inst)
            out.append(Reversion(inst.id, request.id, request.epoch, newest.version))
            return
        park(state, request, out)
    home = state.instances.get(request.instance or "")
    unqueue(state, request)
    _recount(state, request)
    queue(state, request, home, first=False)


def _recount(state: State, request: Request) -> None:
    state.versions[request.version].num_active -= 1
    request.version = state.newest
    state.versions[request.version].num_active += 1
