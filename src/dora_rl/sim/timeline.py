"""What each simulated instance and the trainer did when, for the Gantt chart."""

from __future__ import annotations

from dataclasses import dataclass, field

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.instance import SimInstance
from dora_rl.types import InstanceId, Version


@dataclass(frozen=True, slots=True)
class Bar:
    """`version` None is idle time; `num_requests` is about how many ran."""

    row: str
    begin_s: float
    end_s: float
    version: Version | None
    num_requests: int


def _alike(before: int, after: int) -> bool:
    """Not worth a new bar: a draining batch shows as a stair, not as one bar per request."""
    return 4 * after <= 5 * before and 4 * before <= 5 * after


@dataclass(slots=True)
class Timeline:
    """Bars per instance, closed whenever its version or, clearly, the size of its batch changes."""

    clock: VirtualClock
    bars: list[Bar] = field(default_factory=list[Bar])
    _open: dict[InstanceId, tuple[float, Version | None, int]] = field(
        default_factory=dict[InstanceId, tuple[float, Version | None, int]]
    )
    _training: tuple[int, float] | None = None
    _fed: int = -1  # the last step that a group was fed to

    def see_instance(self, instance: SimInstance) -> None:
        """The instance's batch changed."""
        busy = {v: n for v, n in instance.held.items() if n} if instance.awake else {}
        version = max(busy, key=lambda v: (busy[v], v)) if busy else None
        num_requests = len(instance.running) if version is not None else 0
        now = self.clock.now()
        opened = self._open.get(instance.name)
        if opened is not None and opened[1] == version and _alike(opened[2], num_requests):
            return
        if opened is not None and now > opened[0]:
            self.bars.append(Bar(instance.name, opened[0], now, opened[1], opened[2]))
        self._open[instance.name] = (now, version, num_requests)

    def see(self, event: ev.Event, actions: list[act.Action]) -> None:
        """Training begins with the first group fed, or with the commit before it if that is later,
        and ends with the commit."""
        now = self.clock.now()
        if isinstance(event, ev.StepCommitted) and self._training is not None:
            self.bars.append(Bar("trainer", self._training[1], now, event.step, 1))
            self._training = (self._fed, now) if self._fed > event.step else None
        for action in actions:
            if isinstance(action, act.Feed):
                self._fed = action.step
                self._training = self._training or (action.step, now)

    def close(self) -> list[Bar]:
        now = self.clock.now()
        for name, (begin, version, most) in self._open.items():
            if now > begin:
                self.bars.append(Bar(name, begin, now, version, most))
        self._open.clear()
        return sorted(self.bars, key=lambda bar: (bar.row, bar.begin_s))
