"""LoRA versions: one frozen base, one small adapter slot per version, all decoded in one batch.

The down-projections A of all slots stand under the base matrix they belong to, so that the base's
own product computes them too; the up-projections B are kept per slot:

    weight  [1, N + P, K]   rows [0, N): base;  rows N + slot * R ..: A of that slot (P: padding)
    b       [slot, N, R]    B * alpha / rank; zero outside the part that an A row belongs to
    y = x weight^T          y[:, N + slot * R ..][row] b[slot]^T  is added to  y[:, :N][row]

A packed matrix (query, key, value; gate, up) has one A per part, R = parts * rank. Never changes
the base. Invariant: a slot holds exactly one version's adapter, or zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from dora_rl.model.directory import TensorSource
from dora_rl.model.names import PREFIX, SCALE, places_of
from dora_rl.model.spec import ModelSpec
from dora_rl.types import UserError

ROWS_MULTIPLE = 128  # of the rows under a base matrix, which the GPU's products are cut by


@dataclass(frozen=True, slots=True)
class LoraShape:
    """`LoraShape(rank, slots)`: how many adapters of which size."""

    rank: int
    num_slots: int

    def columns(self, param: str) -> int:
        return self.rank * NUM_PARTS[param.split(".")[-1]]

    def padding(self, param: str) -> int:
        """Rows under a base matrix: all slots' A, rounded up."""
        rows = self.num_slots * self.columns(param)
        return -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE


NUM_PARTS = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}


class Adapters:
    """All slots of one model shape; A lives in the base's own tensors."""

    def __init__(self, spec: ModelSpec, shape: LoraShape, params: dict[str, Tensor]) -> None:
        self.shape = shape
        self.places = places_of(spec)
        self._params = params
        self.b: dict[str, Tensor] = {}
        for name in dict.fromkeys(place.param for place in self.places.values()):
            weight = params[name]
            rows = weight.shape[1] - shape.padding(name)
            weight[:, rows:].zero_()
            self.b[name] = torch.zeros(
                (shape.num_slots, rows, shape.columns(name)),
                dtype=weight.dtype,
                device=weight.device,
            )

    @property
    def bytes_per_version(self) -> int:
        return sum(b[0].nbytes + self.down(name, 0).nbytes for name, b in self.b.items())

    def down(self, param: str, slot: int) -> Tensor:
        """A of a slot, all parts: [R, K], a view."""
        columns = self.shape.columns(param)
        first = self.b[param].shape[1] + slot * columns
        return self._params[param][0, first : first + columns]

    def load(self, slot: int, source: TensorSource, where: str) -> Iterator[str]:
        """Fill a slot, yielding after each layer."""
        if SCALE not in (names := set(source.names())):
            raise UserError(f"{where}: no tensor {SCALE}; this is not a published adapter")
        scale = float(source.tensor(SCALE))
        for param in self.b:
            self.down(param, slot).zero_()
            self.b[param][slot].zero_()
        modules = sorted(self._modules(names, where), key=_layer_of)
        for layer, members in groupby(modules, _layer_of):
            for module in members:
                self._put(slot, module, source, scale, where)
            yield str(layer)

    def _modules(self, names: set[str], where: str) -> list[str]:
        modules = []
        for name in sorted(names - {SCALE}):
            module, found, matrix = name.removeprefix(PREFIX).partition(".lora_")
            if module not in self.places or not found or matrix not in ("A.weight", "B.weight"):
                raise UserError(f"{where}: tensor {name} belongs to no adapter of this model")
            if matrix == "A.weight":
                modules.append(module)
        return modules

    def _put(self, slot: int, module: str, source: TensorSource, scale: float, where: str) -> None:
        place, rank = self.places[module], self.shape.rank
        a = source.tensor(f"{PREFIX}{module}.lora_A.weight").detach()
        b = source.tensor(f"{PREFIX}{module}.lora_B.weight").detach()
        if a.shape[0] > rank or a.shape[1:] != (place.width,) or b.shape != (place.rows, len(a)):
            raise UserError(
                f"{where}: adapter of {module} is {tuple(b.shape)} x {tuple(a.shape)}, "
                f"{(place.rows, rank)} x {(rank, place.width)} was expected"
            )
        first = place.part * rank
        self.down(place.param, slot)[first : first + len(a)].copy_(a)
        rows = slice(place.start, place.start + place.rows)
        self.b[place.param][slot, rows, first : first + len(a)].copy_(b.float() * scale)


def _layer_of(module: str) -> int:
    return int(module.split(".")[2])
