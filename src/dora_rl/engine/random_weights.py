"""Random weights of a given shape, for benchmarks and tests: a source like any other.

Deterministic in (seed, tensor name, kind of device); never reads a file.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dora_rl.engine.spec import ModelSpec
from dora_rl.engine.weights import targets_of


class RandomWeights:
    """Normal values of deviation `scale`; norms are ones."""

    def __init__(
        self, spec: ModelSpec, seed: int = 0, scale: float = 0.02, device: str = "cpu"
    ) -> None:
        self._seed, self._scale, self._device = seed, scale, device
        self._shapes = {
            name: target.shape
            for name, target in targets_of(spec).items()
            if not (target.full and target.param.endswith(("gate_up", "down")))
        }

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        seed = zlib.crc32(f"{self._seed}/{name}".encode())
        generator = torch.Generator(self._device).manual_seed(seed)
        data = torch.randn(shape, generator=generator, device=self._device)
        return data.mul_(self._scale)
