"""Random LoRA adapters of a model directory, and the same versions with their weights merged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dora_rl.model.directory import HfDirectory, read_spec
from dora_rl.model.names import PREFIX, SCALE, places_of


class Tensors:
    """Named tensors as a source."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def random_adapter(path: Path, seed: int, rank: int = 4, scale: float = 2.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    out = {SCALE: torch.tensor([scale])}
    for module, place in places_of(read_spec(path)).items():
        a = torch.randn(rank, place.width, generator=generator) * 0.05
        b = torch.randn(place.rows, rank, generator=generator) * 0.2
        out[f"{PREFIX}{module}.lora_A.weight"] = a
        out[f"{PREFIX}{module}.lora_B.weight"] = b
    return Tensors(out)


def merge(path: Path, adapter: Tensors) -> Tensors:
    """Base + scale * B A."""
    base = HfDirectory(path)
    merged = {name: base.tensor(name) for name in base.names()}
    scale = float(adapter.tensor(SCALE))
    for name in adapter.names():
        if not name.endswith("lora_A.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        b = adapter.tensor(name.replace("lora_A", "lora_B"))
        key = f"{module}.weight"
        merged[key] = merged[key] + scale * (b @ adapter.tensor(name))
    return Tensors(merged)
