"""What differs between one host and many, as the controller sees it.

A world says how weights and KV come to the instance that needs them (`Carrier`), which workers
serve the others (`Service`), and what is done before the start and now and then. One host needs
none of that: a sealed version and an exported request are files in shared memory that every worker
sees.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from dora_rl.core import actions as act
from dora_rl.types import InstanceId, StepIndex, Version
from dora_rl.workers.messages import Exported, Message
from dora_rl.workers.pool import Worker


class Notify:
    """Whoever watches a run: lines to read now, and the figures of steps and evaluations. Lines
    from before anybody watches are kept for who does."""

    def __init__(self) -> None:
        self._early: list[str] = []
        self._on_lines: Callable[[list[str]], None] = self._early.extend
        self.on_step: Callable[[dict[str, object]], None] = lambda line: None

    @property
    def on_lines(self) -> Callable[[list[str]], None]:
        return self._on_lines

    @on_lines.setter
    def on_lines(self, hear: Callable[[list[str]], None]) -> None:
        self._on_lines = hear
        early, self._early = self._early, []
        self(*early)

    def __call__(self, *lines: str) -> None:
        if lines:
            self.on_lines(list(lines))


class Carrier(Protocol):
    """Called at the moments when something must travel; carries no byte itself. Never waits; never
    decides what moves. What one does not say anything of needs nothing."""

    def load(self, action: act.Load) -> None:
        """The instance is about to be told to load a version: see that it gets there."""

    def exported(self, export: Exported, src: InstanceId) -> Exported:
        """With what the destination needs to know to take the request over."""
        ...

    def given_up(self, export: Exported) -> None:
        """An exported request stays where it is: what was laid out for it may go."""

    def retire(self, versions: Collection[Version]) -> None:
        """Nobody needs these versions any more."""


class Service(Protocol):
    """Workers of one role that serve the others and are no business of the core's."""

    def hear(self, worker: Worker, message: Message) -> None: ...
    def lost(self, name: str) -> None: ...
    def fatal(self, worker: Worker, reason: str) -> None:
        """It says why it ends."""


class World(Protocol):
    """Where a run runs. What one does not say anything of needs nothing."""

    carrier: Carrier
    services: Mapping[str, Service]  # by role

    def begin(self, read: Callable[[], None]) -> None:
        """Before anything else is started; `read` hears what workers say, for a moment."""

    def tick(self) -> None:
        """Now and then."""

    def step_closed(self, step: StepIndex) -> None:
        """The step has all its groups; its lines of rollouts.jsonl may be written."""

    def close(self) -> None:
        """At the end."""
