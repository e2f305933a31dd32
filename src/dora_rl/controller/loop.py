"""The one loop of every world: inbox -> core.step -> log -> perform.

Local processes, Ray and the simulator differ in their ports only. The loop decides nothing, and
nothing is performed before its log entry was written: after a crash the log knows every order
that may have reached a worker.
"""

from __future__ import annotations

from collections import deque

from dora_rl.core import actions as act
from dora_rl.core.events import Event
from dora_rl.core.ledger import current
from dora_rl.core.state import State
from dora_rl.core.step import step
from dora_rl.ports import (
    Clock,
    EventLog,
    FleetAction,
    LearnerAction,
    LedgerAction,
    Port,
    Ports,
)
from dora_rl.types import RequestId


class Loop:
    """Feeds events to the core and its actions to the ports."""

    def __init__(self, state: State, ports: Ports) -> None:
        self.state = state
        self.ports = ports

    def handle(self, event: Event) -> list[act.Action]:
        """One turn. Returns the actions it performed."""
        ports, now = self.ports, self.ports.clock.now()
        actions = step(self.state, event, now)
        ports.log.append(now, event, actions)
        for action in actions:
            self._perform(action)
        if ports.log.snapshot_due():
            ports.log.snapshot(now, self.state)
        return actions

    def _perform(self, action: act.Action) -> None:
        ports = self.ports
        match action:
            case act.Score():
                ports.rewards.do(action)
            case act.Feed() | act.CloseStep() | act.RestartLearner() | act.OptimizerRewound():
                ports.learner.do(action)
            case (
                act.IssueGroup()
                | act.EndGroup()
                | act.SetAside()
                | act.RetireVersion()
                | act.WaitFor()
                | act.HoldBack()
                | act.InForce()
                | act.Stop()
            ):
                ports.keeper.do(action)
            case _:
                ports.generator.do(action)


class Control:
    """The core of a run as its parts see it: its state, its end, the way to tell it something.

    What follows from an action while that is being performed is told `later`, when the loop is done
    with it. After the stop nothing is told any more: what comes then is not in the log.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.stop: act.Stop | None = None
        self._later: deque[Event] = deque()
        self._loop: Loop  # from `connect` on

    def connect(
        self,
        clock: Clock,
        generator: Port[FleetAction],
        learner: Port[LearnerAction],
        rewards: Port[act.Score],
        keeper: Port[LedgerAction],
        log: EventLog,
    ) -> None:
        """From now on events are handled, and their actions performed by these."""
        ports = Ports(clock, generator, learner, rewards, keeper, log)
        self._loop = Loop(self.state, ports)

    def is_generating(self, request: RequestId, epoch: int) -> bool:
        """Whether this epoch of a request still wants tokens."""
        return self.stop is None and current(self.state, request, epoch) is not None

    def now(self) -> float:
        """The time by which the core decides."""
        return self._loop.ports.clock.now()

    def handle(self, event: Event) -> None:
        if self.stop is None:
            self._loop.handle(event)
        while self._later and self.stop is None:
            self._loop.handle(self._later.popleft())

    def later(self, event: Event) -> None:
        self._later.append(event)
