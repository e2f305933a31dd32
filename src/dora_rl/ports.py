"""The seams: Protocols between the deciding core and the doing shells.

A port call returns at once; what came of it arrives later as an event in the loop's inbox. Local
processes, Ray actors and the simulator are three sets of objects behind these same Protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from dora_rl.core import actions as act
from dora_rl.core.events import Event
from dora_rl.core.state import State
from dora_rl.types import Version

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Canary:
    """A short forward pass that proves an instance holds what was published.

    `logprobs[i]` is the float32 log-prob of `token_ids[i + 1]` given the tokens before it. The
    forward pass was computed in `dtype`, which need not be that of the published tensors.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str = ""  # empty: not known


class SealedWeights(Protocol):
    """One published version: immutable, checksummed, readable tensor by tensor."""

    @property
    def version(self) -> Version: ...
    @property
    def checksum(self) -> str: ...
    @property
    def canary(self) -> Canary | None: ...
    @property
    def base(self) -> str:
        """Of an adapter: the checksum of the weights that it belongs on; else empty."""
        ...

    def names(self) -> Sequence[str]: ...
    def tensor(self, name: str) -> Tensor: ...


class Draft(Protocol):
    """A version on its way into a store."""

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The memory of one tensor, to be filled before the version is sealed."""
        ...

    def seal(
        self, canary: Canary | None, base: str = "", ready: Callable[[], object] = lambda: None
    ) -> str:
        """Hash what was filled in, call `ready`, seal; returns the checksum."""
        ...

    def discard(self) -> None: ...


class WeightStore(Protocol):
    """Sealed versions, the live window only. A version is published once, then never changes."""

    def publish(
        self,
        version: Version,
        tensors: Iterable[tuple[str, Tensor]],
        canary: Canary | None = None,
        base: str = "",
    ) -> str:
        """Write all tensors, seal, return the checksum. `base`: see `SealedWeights`."""
        ...

    def draft(
        self,
        version: Version,
        num_bytes: int = 0,
        pin: Callable[[Any], Callable[[], None]] | None = None,
    ) -> Draft:
        """Room for a version of about so many bytes. `pin` makes memory of the host known to a
        GPU, and returns what undoes that."""
        ...

    def open(self, version: Version) -> SealedWeights: ...
    def retire(self, version: Version) -> None: ...
    def versions(self) -> Sequence[Version]: ...


FleetAction: TypeAlias = (
    act.Dispatch
    | act.Abort
    | act.Load
    | act.Unload
    | act.Move
    | act.Park
    | act.Unpark
    | act.Reversion
    | act.Sleep
    | act.Wake
    | act.Restart
)
LearnerAction: TypeAlias = act.Feed | act.CloseStep | act.RestartLearner | act.OptimizerRewound
LedgerAction: TypeAlias = (
    act.IssueGroup
    | act.EndGroup
    | act.SetAside
    | act.RetireVersion
    | act.WaitFor
    | act.HoldBack
    | act.InForce
    | act.Stop
)


Asked = TypeVar("Asked", contravariant=True)


class Clock(Protocol):
    """Seconds since some start; virtual in the simulator."""

    def now(self) -> float: ...


class Port(Protocol[Asked]):
    """What performs the actions of one kind."""

    def do(self, action: Asked, /) -> None: ...


class EventLog(Protocol):
    """Append-only. An entry is on its way to the disk before its actions are performed."""

    def append(self, now: float, event: Event, actions: Sequence[act.Action]) -> None: ...
    def snapshot_due(self) -> bool: ...
    def snapshot(self, now: float, state: State) -> None: ...


@dataclass(frozen=True, slots=True)
class Ports:
    """One world: local processes, a cluster, or the simulator."""

    clock: Clock
    generator: Port[FleetAction]  # the rollout instances, addressed by name in each action
    learner: Port[LearnerAction]  # holds fed groups, trains a closed batch, publishes a version
    rewards: Port[act.Score]
    keeper: Port[LedgerAction]  # rows of the table, sealed versions, who watches
    log: EventLog
