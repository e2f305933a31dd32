"""Policy versions in memory: one stacked tensor per packed parameter, one slot per version.

`ModelWeights` has the tensors. It reads Hugging Face directories and sealed versions tensor by
tensor, never unpickles, and packs query, key and value (and gate and up) into one matrix each.
`Residency` says which version is in which slot. A version is loaded layer by layer, between steps
(on a GPU by a thread, beside the steps), and is resident once its checksum and canary agreed.

Invariants: a slot is either empty, filling or holds exactly one complete version; a version number
names one set of weights for as long as it is resident.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dora_rl.engine.options import EngineOptions
from dora_rl.engine.tensors.cache import DTYPES, empty
from dora_rl.model.directory import HfDirectory, TensorSource
from dora_rl.model.names import (
    HEAD,
    PREFIX,
    SCALE,
    Place,
    by_layer,
    check_shape,
    packed_shapes,
    places_of,
    targets_of,
)
from dora_rl.model.rope import head_order, reordered
from dora_rl.model.sealed import CheckedSource, check_base, check_canary
from dora_rl.model.spec import ModelSpec
from dora_rl.out_of_memory import maybe_fail
from dora_rl.types import UserError, Version
from dora_rl.user_code import require

if TYPE_CHECKING:
    from dora_rl.engine.runner import Runner
    from dora_rl.ports import SealedWeights

GIB = 1 << 30
ASIDE_S = 0.0002  # how long a look at a load in another thread may take
HASH_THREADS = 4  # beside it


@dataclass(slots=True)
class Layer:
    """Packed parameters of one layer, each stacked over version slots."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor  # [slot, 2 I, D], or [slot, expert, 2 I, D] in a sparse layer
    down: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    qk_norm: Tensor | None = None  # [slot, heads + kv heads, head dim], or flat over all heads
    router: Tensor | None = None
    norm1: Tensor | None = None  # before attention, of what it adds; the same of the MLP
    post1: Tensor | None = None
    norm2: Tensor | None = None
    post2: Tensor | None = None
    # The B of adapters, by matrix (see `lora`).
    up: dict[str, Tensor] = field(default_factory=dict, init=False)


class ModelWeights:
    """All slots of one model shape on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        num_slots: int,
        device: str,
        dtype: str,
        lora_rank: int = 0,
        lora_head: bool = False,
    ) -> None:
        self.spec, self.num_slots = spec, 1 if lora_rank else num_slots
        self.dtype = DTYPES[dtype]
        self.targets = targets_of(spec)
        self._order = head_order(spec.rope, spec.head_dim)
        self._params: dict[str, Tensor] = {}
        lora = LoraShape(lora_rank, num_slots, lora_head) if lora_rank else None
        own: list[dict[str, Tensor]] = [{} for _ in range(spec.num_layers)]
        exact = {target.param for target in self.targets.values() if target.offset}
        for name, (rows, *columns) in packed_shapes(self.targets).items():
            index, _, matrix = name.rpartition(".")
            if lora is not None and matrix in NUM_PARTS and len(columns) == 1:
                rows += lora.padding(name)
            kind = torch.float32 if name in exact else self.dtype
            param = empty((self.num_slots, rows, *columns), kind, device)
            self._params[name] = param
            if index:
                own[int(index)][matrix] = param
        self.layers = [Layer(**params) for params in own]
        self.embed, self.norm = self._params["embed"], self._params["norm"]
        self.lm_head = self._params.get("lm_head", self.embed)
        self.adapters = None if lora is None else Adapters(spec, lora, self._params)
        for name, up in self.adapters.b.items() if self.adapters else ():
            index, matrix = name.split(".")
            self.layers[int(index)].up[matrix] = up

    @property
    def bytes_per_version(self) -> int:
        return sum(param[0].nbytes for param in self._params.values())

    def linear_shapes(self) -> set[tuple[int, int]]:
        """(out, in) of every matrix a row is multiplied with."""
        weights = [self.lm_head]
        for layer in self.layers:
            weights += [layer.qkv, layer.o, layer.gate_up, layer.down, *layer.up.values()]
            weights += [layer.router] if layer.router is not None else []
        if self.adapters is not None and self.adapters.head is not None:
            weights += self.adapters.head
        return {(weight.shape[-2], weight.shape[-1]) for weight in weights}

    def load_version(self, slot: int, source: TensorSource, where: str) -> Iterator[str]:
        """Fill the slot of a version: its adapter where versions are adapters, else all of it."""
        return (self.adapters or self).load(slot, source, where)

    def load(self, slot: int, source: TensorSource, where: str) -> Iterator[str]:
        """Fill a slot with whole weights, yielding the name of each layer once it is complete."""
        for group, members in by_layer(self.spec, self.targets, source.names(), where).items():
            for name in members:
                self._put(slot, name, source.tensor(name), where)
            yield group

    def _put(self, slot: int, name: str, data: Tensor, where: str) -> None:
        target = self.targets[name]
        check_shape(target, name, tuple(data.shape), where)
        param = self._params[target.param][slot if target.expert < 0 else (slot, target.expert)]
        rows = param[target.start : target.start + target.rows]
        data = data.detach().float() + target.offset if target.offset else data.detach()
        data = reordered(data, target.turned, self._order)
        rows.copy_(data.expand(rows.shape))


def free_bytes(device: str) -> int:
    """Free memory of the device (physical memory not in use, on the CPU)."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def version_bytes(spec: ModelSpec, dtype: str) -> int:
    """Weights of one version."""
    return ModelWeights(spec, 1, "meta", dtype).bytes_per_version


def make_weights(spec: ModelSpec, options: EngineOptions) -> ModelWeights:
    """Room for what the options say; one line for the user where there is not that much."""
    o, free = options, free_bytes(options.device)
    sized = ModelWeights(spec, o.versions_max, "meta", o.dtype, o.lora_rank, o.lora_head)
    each, fit = sized.bytes_per_version, int(free * 0.9) // sized.bytes_per_version
    slots = sized.adapters.bytes_per_version * o.versions_max if sized.adapters else 0
    require(
        (
            not sized.adapters or each + slots <= free * 0.9,
            f"rollout.versions_max is {o.versions_max}: the base takes {each / GIB:.2f} GiB, the "
            f"adapters {slots / GIB:.2f} GiB, and {o.device} has {free / GIB:.2f} GiB free",
        ),
        (
            sized.adapters or fit >= o.versions_max,
            f"rollout.versions_max is {o.versions_max}: each version takes {each / GIB:.2f} GiB "
            f"and {o.device} has {free / GIB:.2f} GiB free; at most {fit} fit",
        ),
    )
    return ModelWeights(spec, o.versions_max, o.device, o.dtype, o.lora_rank, o.lora_head)


class Residency:
    """Version -> weight slot."""

    def __init__(self, runner: Runner, versions_max: int) -> None:
        self._runner, self._versions_max = runner, versions_max
        self.slots: dict[Version, int] = {}
        self._has_base = runner.weights.adapters is None
        self._base = self._base_name = ""  # its checksum, and what to call it
        self._loading: dict[Version, int] = {}

    def versions(self) -> tuple[Version, ...]:
        return tuple(sorted(self.slots))

    def load_base(self, source: TensorSource | str | Path, verify: bool = True) -> None:
        """The weights under every adapter; `verify`: adapters for other weights are refused."""
        assert self._runner.weights.adapters is not None, "only LoRA versions have a base"
        assert not self.slots, "the base is loaded before its adapters"
        where = str(source) if isinstance(source, str | Path) else "the base"
        reader = HfDirectory(source) if isinstance(source, str | Path) else source
        checked = CheckedSource(reader)
        for _ in self._runner.weights.load(0, checked if verify else reader, where):
            pass
        self._has_base, self._base_name = True, where
        self._base = checked.checksum() if verify else ""

    def load(
        self, version: Version, source: SealedWeights | TensorSource | str | Path, verify: bool
    ) -> Iterator[str]:
        """Fill a free slot, yielding after each layer; resident once the iterator is exhausted."""
        slot, where = self._reserve(version), f"version {version}"
        try:
            maybe_fail("load")
            if isinstance(source, str | Path):
                where, source = str(source), HfDirectory(source)
            yield from self._load_checked(slot, version, source, where, verify)
            self.slots[version] = slot
        finally:
            del self._loading[version]

    def retire(self, version: Version) -> None:
        if version not in self.slots:
            raise UserError(f"version {version} is not resident, so it cannot be retired")
        del self.slots[version]

    def _load_checked(
        self,
        slot: int,
        version: Version,
        source: SealedWeights | TensorSource,
        where: str,
        verify: bool,
    ) -> Iterator[str]:
        if (sealed_version := getattr(source, "version", version)) != version:
            raise UserError(f"{where}: the sealed weights say they are version {sealed_version}")
        check_base(source, self._base, self._base_name)
        check: Callable[[], None] | None = getattr(source, "check", None)
        if check is not None:  # it knows best what may happen to it
            yield from self._layers(slot, source, where, then=check)
        elif not verify or not hasattr(source, "checksum"):
            yield from self._layers(slot, source, where)
            return
        else:
            threads = HASH_THREADS if self._runner.loads_aside else 0
            with closing(CheckedSource(source, threads)) as checked:
                yield from self._layers(slot, checked, where, then=checked.checksum)
                checked.check(source)  # pyright: ignore[reportArgumentType]
        if (canary := getattr(source, "canary", None)) is not None:
            logprobs = self._runner.score(slot, canary.token_ids)
            check_canary(canary, logprobs, version, self._runner.weights.dtype)

    def _layers(
        self, slot: int, source: TensorSource, where: str, then: Callable[[], object] = lambda: None
    ) -> Iterator[str]:
        """`then` is called behind the last layer, aside too: it may take its time."""

        def load() -> Iterator[str]:
            yield from self._runner.load(slot, source, where)
            then()

        return aside(load) if self._runner.loads_aside else load()

    def _reserve(self, version: Version) -> int:
        taken = self.slots | self._loading
        free = sorted(set(range(self._versions_max)) - set(taken.values()))
        require(
            (
                self._has_base,
                f"version {version} is an adapter, and its base is not loaded yet",
            ),
            (
                version not in taken,
                f"version {version} is already resident or being loaded",
            ),
            (
                free,
                f"version {version}: all {self._versions_max} weight slots hold "
                f"{sorted(taken)}; retire one or raise rollout.versions_max",
            ),
        )
        self._loading[version] = free[0]
        return free[0]


def aside(load: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Load in a thread; yields nothing of interest for as long as that takes."""
    with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
        loading = pool.submit(lambda: list(load()))
        while not wait([loading], ASIDE_S).done:
            yield ""
        loading.result()


# -------------------------------------------------------------------------------------------------
# LoRA versions: one frozen base, one small adapter slot per version, all decoded in one batch.
#
# The down-projections A of all slots stand under the base matrix they belong to, so that the base's
# own product computes them too; the up-projections B are kept per slot:
#
#     weight  [1, N + P, K]   rows [0, N): base;  rows N + slot * R ..: A of that slot (P: padding)
#     b       [slot, N, R]    B * alpha / rank; zero outside the part that an A row belongs to
#     y = x weight^T          y[:, N + slot * R ..][row] b[slot]^T  is added to  y[:, :N][row]
#
# A packed matrix (query, key, value; gate, up) has one A per part, R = parts * rank. An adapter of
# the output matrix, which may be the embedding too, has its A by itself. Never changes the base.
# Invariant: a slot holds exactly one version's adapter, or zeros.


ROWS_MULTIPLE = 128  # of the rows under a base matrix, which the GPU's products are cut by


@dataclass(frozen=True, slots=True)
class LoraShape:
    """`LoraShape(rank, slots)`: their sizes and number; `head`: also of the output matrix."""

    rank: int
    num_slots: int
    head: bool = False

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
        self._order = head_order(spec.rope, spec.head_dim)
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
        self.head: tuple[Tensor, Tensor] | None = None  # A [slot, R, K] and B [slot, V, R]
        if shape.head:
            embed = params["embed"]
            a = embed.new_zeros((shape.num_slots, shape.rank, spec.hidden))
            self.head = a, embed.new_zeros((shape.num_slots, spec.vocab, shape.rank))
            self.places[HEAD] = Place("", 0, 0, spec.vocab, spec.hidden)

    @property
    def bytes_per_version(self) -> int:
        head = sum(part[0].nbytes for part in self.head or ())
        return head + sum(b[0].nbytes + self.down(name, 0).nbytes for name, b in self.b.items())

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
        for part in self.head or ():
            part[slot].zero_()
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
        if module == HEAD:
            assert self.head is not None
            self.head[0][slot, : len(a)].copy_(a)
            self.head[1][slot, :, : len(a)].copy_(b.float() * scale)
            return
        first = place.part * rank
        self.down(place.param, slot)[first : first + len(a)].copy_(a)
        rows = slice(place.start, place.start + place.rows)
        b = reordered(b, place.turned, self._order)
        self.b[place.param][slot, rows, first : first + len(a)].copy_(b.float() * scale)


def _layer_of(module: str) -> int:
    """The output matrix comes behind all layers."""
    return 1 << 30 if module == HEAD else int(module.split(".")[2])
