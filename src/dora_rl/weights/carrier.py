"""How weights and KV come to the instance that needs them: the seam between one host and many.

The controller calls a carrier at the moments when something must travel; it carries no byte itself.
On one machine nothing has to be done: a sealed version and an exported request are files in shared
memory that every worker sees.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from dora_rl.core import actions as act
from dora_rl.types import InstanceId, Version


class Carrier(Protocol):
    """Never waits; never decides what moves."""

    def load(self, action: act.Load) -> None:
        """The instance is about to be told to load a version: see that it gets there."""
        ...

    def exported(self, body: dict[str, Any], src: InstanceId) -> dict[str, Any]:
        """What the destination needs to know beside `body` to take a request over."""
        ...

    def given_up(self, body: dict[str, Any], src: InstanceId) -> None:
        """An exported request stays where it is: what was laid out for it may go."""
        ...

    def retire(self, versions: Collection[Version]) -> None: ...
    def tick(self) -> None: ...


class SameHost:
    """One machine: what lies in shared memory is everybody's."""

    def load(self, action: act.Load) -> None:
        del action

    def exported(self, body: dict[str, Any], src: InstanceId) -> dict[str, Any]:
        del body, src
        return {}

    def given_up(self, body: dict[str, Any], src: InstanceId) -> None:
        del src
        Path(body["path"]).unlink(missing_ok=True)

    def retire(self, versions: Collection[Version]) -> None:
        del versions

    def tick(self) -> None:
        pass
