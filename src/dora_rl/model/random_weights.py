"""Random weights of a given shape, for benchmarks and tests: a source like any other.

Deterministic in (seed, tensor name, kind of device); never reads a file.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dora_rl.model.names import PREFIX, SCALE, places_of, targets_of
from dora_rl.model.spec import ModelSpec


class RandomWeights:
    """Normal values of deviation `scale`; norms multiply by one."""

    def __init__(
        self,
        spec: ModelSpec,
        seed: int = 0,
        scale: float = 0.02,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._seed, self._scale, self._device, self._dtype = seed, scale, device, dtype
        self._one = 1.0 - spec.norm_offset
        self._shapes = {
            name: target.shape for name, target in targets_of(spec).items() if not target.stacked
        }

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def tensor(self, name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.full(self._shapes[name], self._one, device=self._device)
        drawn = _randn(f"{self._seed}/{name}", self._shapes[name], self._device, self._dtype)
        return drawn.mul_(self._scale)


class RandomAdapter:
    """A LoRA adapter of every linear layer, of a size that moves the logits."""

    def __init__(self, spec: ModelSpec, seed: int, rank: int, device: str = "cpu") -> None:
        self._seed, self._device = seed, device
        self._shapes = {
            f"{PREFIX}{module}.lora_{part}.weight": shape
            for module, place in places_of(spec).items()
            for part, shape in (("A", (rank, place.width)), ("B", (place.rows, rank)))
        }

    def names(self) -> Sequence[str]:
        return [SCALE, *self._shapes]

    def tensor(self, name: str) -> Tensor:
        if name == SCALE:
            return torch.ones(1)
        return _randn(f"{self._seed}/{name}", self._shapes[name], self._device).mul_(0.02)


def _randn(
    key: str, shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)
