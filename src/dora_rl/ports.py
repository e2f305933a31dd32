"""The seams: Protocols between the deciding core and the doing shells.

A port call returns at once; what came of it arrives later as an event in the loop's inbox. Local
processes, Ray actors and the simulator are three sets of objects behind these same Protocols.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dora_rl.types import Version

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Canary:
    """A short forward pass that proves an instance holds what was published.

    `logprobs[i]` is the float32 log-prob of `token_ids[i + 1]` given the tokens before it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class SealedWeights(Protocol):
    """One published version: immutable, checksummed, readable tensor by tensor."""

    @property
    def version(self) -> Version: ...
    @property
    def checksum(self) -> str: ...
    @property
    def canary(self) -> Canary | None: ...
    def names(self) -> Sequence[str]: ...
    def tensor(self, name: str) -> Tensor: ...


class WeightStore(Protocol):
    """Sealed versions, the live window only. A version is published once, then never changes."""

    def publish(
        self, version: Version, tensors: Iterable[tuple[str, Tensor]], canary: Canary | None = None
    ) -> str:
        """Write all tensors, seal, return the checksum."""
        ...

    def open(self, version: Version) -> SealedWeights: ...
    def retire(self, version: Version) -> None: ...
    def versions(self) -> Sequence[Version]: ...
