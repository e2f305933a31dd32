"""Instances on the trainer's devices: they sleep from a batch's closing to its publication.

Requests of a sleeping instance move with their KV where there is room, else they are parked with
it; a parked request needs no instance.
"""

from __future__ import annotations

from dora_rl.core.actions import Action, Sleep, Wake
from dora_rl.core.placement import relocate, touch
from dora_rl.core.state import State


def training_now(state: State) -> bool:
    """A closed batch is with the learner and its version is not published yet."""
    batch = state.batches.get(state.committed)
    return batch is not None and batch.close_sent


def sleep_elastic(state: State, now: float, out: list[Action]) -> None:
    """None of them takes anything new; each is emptied and sent to sleep as events have room."""
    if not state.num_elastic:
        return
    state.waking.clear()
    for inst in state.instances.values():
        if inst.elastic and inst.awake:
            inst.awake = False
            state.slots_awake -= inst.slots_max
            state.drowsy[inst.id] = None
    go_on(state, now, out)


def wake_elastic(state: State, now: float, out: list[Action]) -> None:
    if not state.num_elastic:
        return
    for inst in state.instances.values():
        if inst.elastic and not inst.awake:
            state.waking[inst.id] = None
    go_on(state, now, out)


def go_on(state: State, now: float, out: list[Action]) -> None:
    """Send to sleep and wake up as many as this event has room for."""
    for name in list(state.waking):
        if not state.has_room(out):
            return
        del state.waking[name]
        inst = state.instances[name]
        inst.awake = True
        state.slots_awake += inst.slots_max
        if name in state.drowsy:
            del state.drowsy[name]  # it was never told to sleep
        else:
            out.append(Wake(name))
        touch(state, inst)
    for name in list(state.drowsy):
        if not state.has_room(out):
            return
        del state.drowsy[name]
        inst = state.instances[name]
        for version in list(inst.held):
            relocate(state, inst, version, now, out)
        out.append(Sleep(name))
