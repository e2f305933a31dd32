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
    if not state.num_elastic:
        return
    sleepers = [inst for inst in state.instances.values() if inst.elastic and inst.awake]
    for inst in sleepers:
        inst.awake = False
        state.slots_awake -= inst.slots_max
    for inst in sleepers:
        for version in list(inst.held):
            relocate(state, inst, version, now, out)
        out.append(Sleep(inst.id))


def wake_elastic(state: State, out: list[Action]) -> None:
    if not state.num_elastic:
        return
    for inst in state.instances.values():
        if inst.elastic and not inst.awake:
            inst.awake = True
            state.slots_awake += inst.slots_max
            out.append(Wake(inst.id))
            touch(state, inst)
