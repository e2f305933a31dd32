"""Which incarnation of a worker speaks: what an earlier one said late, or twice, is not believed.

Every worker has a name for the whole run and an incarnation for each of its starts. The core
remembers the newest of each name that has joined or was lost. Invariant: it only grows, so an
instance that is gone cannot come back by a message that was under way.
"""

from __future__ import annotations

from dora_rl.core.events import (
    BatchAccepted,
    Event,
    InstanceJoined,
    InstanceLost,
    InstanceReport,
    Loaded,
    LoadFailed,
    Moved,
    MoveFailed,
    SampleFailed,
    SampleFinished,
    StepCommitted,
    TrainerJoined,
    TrainerLost,
    TrainerReport,
    VersionDurable,
)
from dora_rl.core.state import State
from dora_rl.types import InstanceId


def is_late(state: State, event: Event) -> bool:
    """Whether it comes from another incarnation of its worker than the one that is known.

    A join and a loss may also come from a newer one: `note` makes it the one that is known.
    """
    match event:
        case SampleFinished() | InstanceReport() | Loaded() | SampleFailed() | LoadFailed():
            return event.incarnation >= 0 and _is_other(state, event.instance, event.incarnation)
        case Moved():
            return event.incarnation >= 0 and _is_other(state, event.dst, event.incarnation)
        case MoveFailed():
            return event.incarnation >= 0 and _is_other(state, event.src, event.incarnation)
        case BatchAccepted() | StepCommitted() | VersionDurable() | TrainerReport():
            return event.incarnation >= 0 and event.incarnation != state.trainer.incarnation
        case InstanceJoined():
            return event.life <= state.incarnations.get(event.instance, -1)
        case InstanceLost():
            return 0 <= event.incarnation < state.incarnations.get(event.instance, -1)
        case TrainerJoined():
            return 0 <= event.incarnation <= state.trainer.incarnation
        case TrainerLost():
            return 0 <= event.incarnation < state.trainer.incarnation
        case _:
            return False


def _is_other(state: State, name: InstanceId, incarnation: int) -> bool:
    return state.incarnations.get(name, -1) != incarnation


def note(state: State, event: Event) -> None:
    """Remember who joined or was lost. A loss may overtake the join, which is late then."""
    match event:
        case InstanceJoined():
            state.incarnations[event.instance] = event.life
        case InstanceLost() if event.incarnation >= 0:
            state.incarnations[event.instance] = event.incarnation
        case TrainerJoined() | TrainerLost() if event.incarnation >= 0:
            state.trainer.incarnation = event.incarnation
        case _:
            pass


def forget_all(state: State) -> None:
    """The run was resumed: every worker is new, and may begin to count again."""
    state.incarnations.clear()
    state.trainer.incarnation = -1
