"""A whole simulated run: the real core and loop, with clock, fleet, learner and rewards replaced.

The controller may die and come back from its log, as the real one does with `--resume`: its
memory and all messages on the way to it are gone, the learner's sealed versions and the journals
are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dora_rl.controller.loop import Loop
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.core.state import State
from dora_rl.core.step import initial
from dora_rl.observe.eventlog import MemoryLog
from dora_rl.ports import EventLog, LedgerAction, Ports
from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.faults import Faults
from dora_rl.sim.fleet import Fleet, InstanceSpec
from dora_rl.sim.hardware import RolloutCost, TrainCost
from dora_rl.sim.learner import SimLearner, SimRewards
from dora_rl.types import GroupId, InstanceId, RequestId


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Everything a simulated run is made from."""

    params: Params
    instances: tuple[tuple[InstanceId, InstanceSpec, RolloutCost], ...]
    train: TrainCost
    task: Callable[[int, int], tuple[int, int]]
    reward_of: Callable[[RequestId, int], float]
    latency_of: Callable[[RequestId, int], float]
    report_s: float = 10.0
    tick_s: float = 5.0
    colocated_s: float = 0.0
    durable_s: float = 0.0  # from the seal of a version to its being on disk


@dataclass(slots=True)
class SimKeeper:
    """Remembers what the ledger said: who was issued and how each group ended."""

    issued: dict[GroupId, act.IssueGroup] = field(default_factory=dict[GroupId, act.IssueGroup])
    ended: list[act.EndGroup] = field(default_factory=list[act.EndGroup])
    stop: act.Stop | None = None

    def do(self, action: LedgerAction) -> None:
        match action:
            case act.IssueGroup():
                self.issued[action.group] = action
            case act.EndGroup():
                self.ended.append(action)
            case act.Stop():
                self.stop = action
            case _:
                pass


class ControllerCrash(Exception):
    """Raised by a log in the middle of a turn: the controller dies there."""


class World:
    """Builds the ports, starts the run, lets time pass."""

    def __init__(
        self, spec: WorldSpec, faults: Faults | None = None, log: EventLog | None = None
    ) -> None:
        self.spec = spec
        self.faults = faults or Faults()
        self.clock = VirtualClock()
        self.log: EventLog = log or MemoryLog()
        self.keeper = SimKeeper()
        self.fleet = Fleet(self.clock, self.post, spec.task, self.faults, spec.report_s)
        self.learner = SimLearner(
            self.clock,
            self.post,
            spec.train,
            self._lengths_of,
            update_groups=max(1, spec.params.batch_groups // spec.train.updates_per_step),
            colocated_s=spec.colocated_s,
            durable_s=spec.durable_s if spec.params.durable_behind else None,
        )
        self.rewards = SimRewards(
            self.clock, self.post, spec.reward_of, spec.latency_of, self.faults
        )
        self.life = 0  # of the controller; messages to an earlier life are lost
        self.ticking = False
        self.watchers: list[Callable[[ev.Event, list[act.Action]], None]] = []
        self.loop: Loop | None = Loop(initial(spec.params), self._ports())

    def _ports(self) -> Ports:
        return Ports(self.clock, self.fleet, self.learner, self.rewards, self.keeper, self.log)

    def _lengths_of(self, group: GroupId, samples: tuple[int, ...]) -> list[int]:
        payload = [self.fleet.finished[RequestId(group, sample)] for sample in samples]
        return [int(request.context) for request in payload]

    def post(self, event: ev.Event, valid: Callable[[], bool] = lambda: True) -> None:
        """A message to the controller, late or twice if the faults say so."""
        life = self.life

        def arrive() -> None:
            if valid():
                self._deliver(event, life)

        delay_s = self.faults.delay_s()
        self.clock.after(delay_s, arrive)
        if (again_s := self.faults.again_s()) is not None:
            self.clock.after(delay_s + again_s, arrive)

    def _deliver(self, event: ev.Event, life: int) -> None:
        if self.loop is None or life != self.life or self.keeper.stop is not None:
            return
        try:
            actions = self.loop.handle(event)
        except ControllerCrash:
            self.kill_controller()
            return
        for watcher in self.watchers:
            watcher(event, actions)

    def start(self) -> None:
        self._deliver(ev.Started(self.spec.params), self.life)
        self._join_workers()
        self._tick()

    def _join_workers(self) -> None:
        self.learner.join()
        for name, spec, cost in self.spec.instances:
            if name in self.fleet.instances:
                self.fleet.die(name)  # came up while nobody listened
            self.fleet.join(name, spec, cost)

    def _tick(self) -> None:
        self.ticking = self.keeper.stop is None
        if self.ticking:
            self._deliver(ev.Tick(), self.life)
            self.clock.after(self.spec.tick_s, self._tick)

    def kill_controller(self) -> None:
        """Controller and workers die together; memory and messages are gone."""
        self.life += 1
        self.loop = None
        for name in list(self.fleet.instances):
            self.fleet.die(name)
        if self.learner.alive:
            self.learner.die()

    def lose_host(self) -> None:
        """As `kill_controller`, and its shared memory is gone."""
        self.kill_controller()
        self.learner.lose_host()

    def resume_controller(self, state: State, **changes: int) -> None:
        """Go on from a recovered state; K, B or the number of steps may change."""
        self.loop = Loop(state, self._ports())
        self.keeper.stop = None
        self._deliver(ev.Resumed(replace(state.target or state.params, **changes)), self.life)
        if self.learner.sealed < state.committed:
            self._deliver(ev.Rewound(self.learner.sealed), self.life)
        self._join_workers()

    def resume_stopped(self, state: State) -> None:
        """The run has stopped itself and is resumed by its user."""
        self.kill_controller()
        self.resume_controller(state)
        if not self.ticking:
            self._tick()

    def run(self, until_s: float = float("inf")) -> bool:
        """True if the run came to its stop."""
        return self.clock.run(lambda: self.keeper.stop is not None, until_s)
