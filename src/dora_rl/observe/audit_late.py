"""Which messages of a log came late or twice, told from the log alone.

By the definition of `core.events`: a worker's message counts if it is of the incarnation that
joined last (or of a newer one, for a join or a loss), and an answer counts if it is to the last
order. What is not known (-1, in logs of earlier releases) counts.
"""

from __future__ import annotations

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.types import GroupId, InstanceId

LEARNER = ""  # no instance has this name


class LateMessages:
    """Told of every event and action of a run, in order."""

    def __init__(self) -> None:
        self._newest: dict[InstanceId, int] = {}
        self._loads: dict[InstanceId, int] = {}
        self._moves: dict[GroupId, dict[int, int]] = {}  # by sample

    def is_late(self, event: ev.Event) -> bool:
        """Asked once for each event; what is not late is remembered."""
        match event:
            case ev.Resumed():
                self._newest.clear()
                return False
            case ev.InstanceJoined():
                return not self._begins(event.instance, event.life, 1)
            case ev.TrainerJoined():
                return not self._begins(LEARNER, event.incarnation, 1)
            case ev.InstanceLost():
                return not self._begins(event.instance, event.incarnation, 0)
            case ev.TrainerLost():
                return not self._begins(LEARNER, event.incarnation, 0)
            case ev.Moved():
                return self._is_other(event.dst, event) or self._was_asked_again(event)
            case ev.MoveFailed():
                return self._is_other(event.src, event) or self._was_asked_again(event)
            case ev.Loaded() | ev.LoadFailed():
                asked = self._loads.get(event.instance, -1)
                return self._is_other(event.instance, event) or event.attempt not in (-1, asked)
            case ev.InstanceReport() | ev.SampleFinished() | ev.SampleFailed():
                return self._is_other(event.instance, event)
            case ev.BatchAccepted() | ev.StepCommitted() | ev.VersionDurable() | ev.TrainerReport():
                return self._is_other(LEARNER, event)
            case _:
                return False

    def see(self, action: act.Action) -> None:
        match action:
            case act.Load():
                self._loads[action.instance] = action.attempt
            case act.Move():
                asked = self._moves.setdefault(action.request.group, {})
                asked[action.request.sample] = action.attempt
            case act.EndGroup():
                self._moves.pop(action.group, None)
            case _:
                pass

    def _begins(self, name: InstanceId, incarnation: int, more: int) -> bool:
        newest = self._newest.get(name, -1)
        if incarnation >= newest + more:
            self._newest[name] = incarnation
            return True
        return incarnation < 0

    def _is_other(self, name: InstanceId, event: ev.Event) -> bool:
        incarnation: int = getattr(event, "incarnation", -1)
        return incarnation >= 0 and incarnation != self._newest.get(name, -1)

    def _was_asked_again(self, event: ev.Moved | ev.MoveFailed) -> bool:
        asked = self._moves.get(event.request.group, {})
        return event.attempt not in (-1, asked.get(event.request.sample, -1))
