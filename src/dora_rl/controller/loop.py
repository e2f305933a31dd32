"""The one loop of every world: inbox -> core.step -> log -> perform.

Local processes, Ray and the simulator differ in their ports only. The loop decides nothing, and
nothing is performed before its log entry was written: after a crash the log knows every order
that may have reached a worker.
"""

from __future__ import annotations

from dora_rl.core import actions as act
from dora_rl.core.events import Event
from dora_rl.core.state import State
from dora_rl.core.step import step
from dora_rl.ports import Ports


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
            case act.Feed() | act.CloseStep() | act.RestartTrainer() | act.OptimizerRewound():
                ports.learner.do(action)
            case (
                act.IssueGroup()
                | act.EndGroup()
                | act.SetAside()
                | act.RetireVersion()
                | act.WaitFor()
                | act.InForce()
                | act.Stop()
            ):
                ports.keeper.do(action)
            case _:
                ports.generator.do(action)
