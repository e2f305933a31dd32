"""Policy versions in memory: one stacked tensor per packed parameter, one slot per version.

Reads Hugging Face directories and sealed versions tensor by tensor, never unpickles, and packs
query, key and value (and gate and up) into one matrix each. `load` is a generator that yields
between layers, so that other versions go on decoding. Invariant: a slot is either empty, filling
or holds exactly one complete version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from dora_rl.engine.tensors import pages
from dora_rl.engine.tensors.cache import DTYPES
from dora_rl.engine.tensors.lora import NUM_PARTS, Adapters, LoraShape
from dora_rl.model.directory import TensorSource
from dora_rl.model.names import by_layer, check_shape, targets_of
from dora_rl.model.spec import ModelSpec


@dataclass(slots=True)
class Layer:
    """Packed parameters of one layer, each stacked over version slots."""

    norm1: Tensor
    qkv: Tensor
    o: Tensor
    norm2: Tensor
    gate_up: Tensor  # [slot, 2 I, D], or [slot, expert, 2 I, D] in a sparse layer
    down: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    qk_norm: Tensor | None = None  # [slot, heads + kv heads, head dim]
    router: Tensor | None = None
    up: dict[str, Tensor] = field(default_factory=dict)  # adapters' B by matrix (see `lora`)


class ModelWeights:
    """All slots of one model shape on one device."""

    def __init__(
        self, spec: ModelSpec, num_slots: int, device: str, dtype: str, lora_rank: int = 0
    ) -> None:
        self.spec, self.num_slots = spec, 1 if lora_rank else num_slots
        self.dtype = DTYPES[dtype]
        self._device = device
        self._params: dict[str, Tensor] = {}
        self._lora = LoraShape(lora_rank, num_slots) if lora_rank else None
        self.embed = self._new("embed", spec.vocab, spec.hidden)
        self.layers = [self._new_layer(index) for index in range(spec.num_layers)]
        self.norm = self._new("norm", spec.hidden)
        head = self.embed if spec.tied else self._new("lm_head", spec.vocab, spec.hidden)
        self.lm_head = head
        self.targets = targets_of(spec)
        self.adapters: Adapters | None = None
        if self._lora is not None:
            self.adapters = Adapters(spec, self._lora, self._params)
            for name, up in self.adapters.b.items():
                index, matrix = name.split(".")
                self.layers[int(index)].up[matrix] = up

    @property
    def bytes_per_version(self) -> int:
        return sum(p[0].numel() * p.element_size() for p in self._params.values())

    def linear_shapes(self) -> list[tuple[int, int]]:
        """(out, in) of every matrix a row is multiplied with."""
        shapes = {tuple(self.lm_head.shape[1:])}
        for layer in self.layers:
            for weight in (layer.qkv, layer.o, layer.gate_up, layer.down, layer.router):
                if weight is not None:
                    shapes.add(tuple(weight.shape[-2:]))
            shapes |= {tuple(up.shape[1:]) for up in layer.up.values()}
        return sorted((int(shape[0]), int(shape[1])) for shape in shapes)

    def load_version(self, slot: int, source: TensorSource, where: str) -> Iterator[str]:
        """Fill the slot of a version: its adapter where versions are adapters, else all of it."""
        if self.adapters is not None:
            return self.adapters.load(slot, source, where)
        return self.load(slot, source, where)

    def load(self, slot: int, source: TensorSource, where: str) -> Iterator[str]:
        """Fill a slot with whole weights, yielding the name of each layer once it is complete."""
        needed = by_layer(self.spec, self.targets, source.names(), where)
        for group, members in needed.items():
            for name in members:
                self._put(slot, name, source.tensor(name), where)
            yield group

    def _put(self, slot: int, name: str, data: Tensor, where: str) -> None:
        target, data = self.targets[name], data.detach()
        check_shape(target, name, tuple(data.shape), where)
        param = self._params[target.param][slot]
        if target.expert >= 0 and not target.full:
            param = param[target.expert]
        if not target.full:
            param = param[target.start : target.start + (target.repeat or data.shape[0])]
        param.copy_(data.expand(param.shape) if target.repeat else data)

    def _new(self, name: str, *shape: int) -> Tensor:
        if self._lora is not None and name.split(".")[-1] in NUM_PARTS and len(shape) == 2:
            shape = (shape[0] + self._lora.padding(name), shape[1])
        param = pages.empty((self.num_slots, *shape), self.dtype, self._device)
        self._params[name] = param
        return param

    def _new_layer(self, i: int) -> Layer:
        spec, d = self.spec, self.spec.hidden
        layer = Layer(
            norm1=self._new(f"{i}.norm1", d),
            qkv=self._new(f"{i}.qkv", spec.qkv_rows, d),
            o=self._new(f"{i}.o", d, spec.num_heads * spec.head_dim),
            norm2=self._new(f"{i}.norm2", d),
            gate_up=self._new(f"{i}.gate_up", *self._mlp_shape(i, 2)),
            down=self._new(f"{i}.down", *self._mlp_shape(i, 0)),
        )
        if spec.qkv_bias:
            layer.qkv_bias = self._new(f"{i}.qkv_bias", spec.qkv_rows)
        if spec.o_bias:
            layer.o_bias = self._new(f"{i}.o_bias", d)
        if spec.mlp_bias:
            layer.gate_up_bias = self._new(f"{i}.gate_up_bias", 2 * spec.intermediate)
            layer.down_bias = self._new(f"{i}.down_bias", d)
        if spec.qk_norm:
            heads = spec.num_heads + spec.num_kv_heads
            layer.qk_norm = self._new(f"{i}.qk_norm", heads, spec.head_dim)
        if spec.moe and spec.is_sparse(i):
            layer.router = self._new(f"{i}.router", spec.moe.num_experts, d)
        return layer

    def _mlp_shape(self, i: int, num_gates: int) -> tuple[int, ...]:
        spec, moe = self.spec, self.spec.moe if self.spec.is_sparse(i) else None
        inner = moe.intermediate if moe else spec.intermediate
        shape = (num_gates * inner, spec.hidden) if num_gates else (spec.hidden, inner)
        return (moe.num_experts, *shape) if moe else shape
