"""No number in what is sealed, saved or loaded is infinite or none at all.

A single such weight makes every later one so, and instances refuse the version or answer nonsense.
What is looked at is read once where it lies; a device is waited for a single time, at the end.

Never changes anything. Invariant: a version or checkpoint that was written held finite numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

import torch
from torch import Tensor

from dora_rl.ports import Canary
from dora_rl.types import UserError

SQUARES = "exp_avg_sq"  # AdamW's second moments: a mean of squares


class NotFinite(UserError):
    """Weights or moments hold an infinite value, or none at all."""


class Ranges:
    """The smallest and largest values of tensors; where both are finite, all between are."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._found: list[Tensor] = []

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        """`dtype`: what it is rounded to, which may have less room."""
        if tensor.numel() and tensor.is_floating_point():
            self._names.append(name)
            ends = torch.stack(torch.aminmax(tensor.detach()))
            self._found.append(ends.to(dtype or tensor.dtype).float())

    def passing(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def ends(self) -> list[tuple[str, float, float]]:
        if not self._found:
            return []
        device = self._found[0].device
        rows = torch.stack([found.to(device) for found in self._found]).tolist()
        return [(name, low, high) for name, (low, high) in zip(self._names, rows, strict=True)]

    def problem(self) -> str:
        """The first that is not finite, and how many are; "" if all are."""
        bad = [name for name, low, high in self.ends() if not (isfinite(low) and isfinite(high))]
        return "" if not bad else bad[0] + (f" and {len(bad) - 1} more" if bad[1:] else "")

    def check(self, what: str) -> None:
        if problem := self.problem():
            raise NotFinite(
                f"{what} would have weights that are not finite ({problem}) and is not written; "
                "--resume goes on from the version before; lower trainer.lr, or look at the "
                "rewards and algorithm.loss"
            )


def check_canary(canary: Canary, version: int) -> None:
    """Finite weights can give log-probs that are not."""
    if not all(map(isfinite, canary.logprobs)):
        raise NotFinite(
            f"version {version} gives log-probs that are not finite, and is not sealed; --resume "
            "goes on from the version before; lower trainer.lr, or look at algorithm.loss"
        )


def check_moments(tensors: Mapping[str, Tensor]) -> None:
    """Before they are used: a flipped bit in them would make weights that are not finite."""
    ranges = Ranges()
    for name, tensor in tensors.items():
        ranges.add(name, tensor)
    for name, low, high in ranges.ends():
        if not (isfinite(low) and isfinite(high)):
            raise NotFinite(f"the optimizer's moments are not finite ({name})")
        if low < 0 and name.endswith(SQUARES):
            raise NotFinite(f"the optimizer's moments are no squares ({name} is negative)")
