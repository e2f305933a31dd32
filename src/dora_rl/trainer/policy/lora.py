"""Low-rank adapters: the linear layers that carry them, and how they are published and saved.

Weights stay in their own dtype and are cast to the dtype of the activations where they are used.
Never trains anything but the adapters, and never computes a gradient of a weight that carries one.
Invariants: a policy computes with exactly what it publishes, adapters or merged weights in the
compute dtype, and with the same numbers compiled or not, with gradients or without; the saved
adapter is what `peft.PeftModel.from_pretrained` loads on top of the same base model.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dora_rl.config import TrainerConfig
from dora_rl.model.directory import HfDirectory, write_adapter
from dora_rl.model.names import FUSED_LAYERS, LINEAR_LAYERS, PREFIX, SCALE
from dora_rl.ports import SealedWeights
from dora_rl.trainer.distributed import like_shard
from dora_rl.types import UserError
from dora_rl.user_code import require

ADAPTER = "default"
_BASE = ".base_layer."
# Two matrices with that many times more outputs than inputs add their adapters inside the product:
# longer rows to read, but no second pass over the outputs.
_WIDE = 2


class Linear(nn.Linear):
    """A linear layer that casts its float32 weight to the activations' dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), bias_of(self, input.dtype))


def bias_of(layer: nn.Linear, dtype: torch.dtype) -> Tensor | None:
    return None if layer.bias is None else layer.bias.to(dtype)


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter, under peft's names; computed as it is published.

    adapters: base(x) + B(A(x)) with alpha/rank in B, all products in the activations' dtype, which
    is what an engine does with a published adapter.
    merged: one product with the merged weight, rounded as it is published; the gradient reaches
    the adapter as if nothing had been rounded.
    """

    def __init__(self, base: nn.Linear, options: TrainerConfig) -> None:
        super().__init__()
        device, rank = base.weight.device, options.lora_rank
        down = Linear(base.in_features, rank, bias=False)  # initialised on the CPU: the same
        up = Linear(rank, base.out_features, bias=False)  # numbers on every device
        nn.init.kaiming_uniform_(down.weight, a=5**0.5)
        nn.init.zeros_(up.weight)
        self.base_layer = base
        self.lora_A = nn.ModuleDict({ADAPTER: down.to(device)})
        self.lora_B = nn.ModuleDict({ADAPTER: up.to(device)})
        self.lora_dropout = nn.Dropout(options.lora_dropout)
        self.scale = options.lora_alpha / rank
        self.merges = options.lora_publish == "merged"

    def factors(self) -> tuple[Tensor, Tensor]:
        """A (rank, in) and B (out, rank)."""
        return self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight  # type: ignore[return-value]

    @property
    def noisy(self) -> bool:
        """Whether its adapter sees an input of its own."""
        return self.lora_dropout.p > 0 and self.lora_dropout.training

    def forward(self, x: Tensor) -> Tensor:
        if self.merges and not self.noisy:  # noise has no merged form
            return self._merged(x)
        if not isinstance(self.base_layer, Linear):  # of a model that transformers runs
            delta = self.lora_B[ADAPTER](self.lora_A[ADAPTER](self.lora_dropout(x)))
            return self.base_layer(x) + delta * self.scale
        return self.add_to_base(x, low_rank(self.lora_dropout(x), self.down(x.dtype)))

    def down(self, dtype: torch.dtype) -> Tensor:
        return self.factors()[0].to(dtype)

    def up(self, dtype: torch.dtype) -> Tensor:
        """B · alpha/rank from and to numbers of `dtype`: what an engine makes of a version."""
        return scaled(self.factors()[1], self.scale, dtype)

    def add_to_base(self, x: Tensor, xa: Tensor) -> Tensor:
        base, dtype = self.base_layer, x.dtype
        return adapted(x, base.weight.to(dtype), bias_of(base, dtype), xa, self.up(dtype))

    def _merged(self, x: Tensor) -> Tensor:
        a, b = self.factors()
        # What a linear layer computes in: x's own dtype, unless autocast says otherwise.
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.no_grad():
            whole = merged_weight(self.base_layer.weight, a, b, self.scale, dtype)
        y = F.linear(x, whole, bias_of(self.base_layer, dtype))
        return _AdapterGradient.apply(y, x.detach(), a, b, self.scale)  # type: ignore[return-value]


def side_by_side(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """The products of one input with several layers; their adapters share the first product."""
    group = [layer for layer in layers if _shares_input(layer)]
    if not group:
        return [layer(x) for layer in layers]
    downs = [layer.down(x.dtype) for layer in group]
    xa = low_rank(x, torch.cat(downs))
    if len(layers) == len(group) == 2 and _is_wide(group[0].base_layer, group[1].base_layer):
        gate, up = (layer.base_layer.weight.to(x.dtype) for layer in group)
        b_gate, b_up = (layer.up(x.dtype) for layer in group)
        return list(adapted_pair(x, gate, up, xa, b_gate, b_up).chunk(2, dim=1))
    parts = iter(xa.split([a.shape[0] for a in downs], dim=1))
    return [
        layer.add_to_base(x, next(parts)) if _shares_input(layer) else layer(x) for layer in layers
    ]


def _shares_input(layer: nn.Module) -> TypeGuard[LoraLinear]:
    alone = isinstance(layer, LoraLinear) and not (layer.noisy or layer.merges)
    return alone and isinstance(layer.base_layer, Linear)


def _is_wide(a: nn.Linear, b: nn.Linear) -> bool:
    same = a.out_features == b.out_features and a.bias is None and b.bias is None
    return same and a.out_features + b.out_features > _WIDE * a.in_features


class _AdapterGradient(torch.autograd.Function):
    """Its input, with the gradient of base(x) + scale·B(A(x)) for the adapter; what x gets comes
    through the merged weight."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.scale = scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, a, b), (grad,), scale = ctx.saved_tensors, grads, ctx.scale
        x_PI, grad_PO = x.flatten(0, -2).to(grad.dtype), grad.flatten(0, -2)
        grad_b = grad_PO.t() @ (x_PI @ a.to(grad.dtype).t())
        grad_a = (grad_PO @ b.to(grad.dtype)).t() @ x_PI
        return grad, None, grad_a.to(a.dtype) * scale, grad_b.to(b.dtype) * scale, None


# -- operators ------------------------------------------------------------------------------------
#
# The compiler leaves them alone. It would add an adapter's part to the base's before or after
# rounding, as it finds fastest for each graph, and a frozen twin would not round as the policy
# does. What lies around them is fused as usual.

Function: TypeAlias = Callable[..., Any]


def operator(*, shape: Function, keep: Function, backward: Function) -> Callable[[Function], Any]:
    """Makes a function an operator of its own: `shape` gives an empty result, `keep` saves for
    `backward` what that needs."""

    def make(function: Function) -> Any:
        made = torch.library.custom_op(f"dora_rl::{function.__name__}", function, mutates_args=())
        made.register_fake(shape)
        made.register_autograd(backward, setup_context=keep)
        return made

    return make


@torch.library.custom_op("dora_rl::merged_weight", mutates_args=())
def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """base + scale·B·A in float32, from and to numbers of `dtype`: those a policy computes with."""
    weight, a, b = (t.to(dtype).float() for t in (weight, a, b))
    with torch.autocast(weight.device.type, enabled=False):
        return (weight + scale * (b @ a)).to(dtype)


@merged_weight.register_fake
def _(weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)


def _keep_scale(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scale, ctx.dtype = inputs[1], inputs[0].dtype


@operator(
    shape=lambda b, scale, dtype: b.new_empty(b.shape, dtype=dtype),
    keep=_keep_scale,
    backward=lambda ctx, grad: (grad.to(ctx.dtype) * ctx.scale, None, None),
)
def scaled(b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """b · scale from and to numbers of `dtype`. (Compilers before torch 2.13 leave out the first
    rounding, which a twin in `dtype` has behind it.)"""
    return (b.to(dtype).float() * scale).to(dtype)


def _low_rank_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    x, a = ctx.saved_tensors
    return grad @ a if ctx.needs_input_grad[0] else None, grad.t() @ x


@operator(
    shape=lambda x, a: x.new_empty((x.shape[0], a.shape[0])),
    keep=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=_low_rank_backward,
)
def low_rank(x: Tensor, a: Tensor) -> Tensor:
    """x (P, I) down to the ranks of every adapter that shares it: (P, R)."""
    return x @ a.t()


def _adapted_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, xa, b = ctx.saved_tensors
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    return grad_x, None, None, grad @ b, grad.t() @ xa


@operator(
    shape=lambda x, weight, bias, xa, b: x.new_empty((x.shape[0], weight.shape[0])),
    # x is of no use: W has no gradient.
    keep=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1], *inputs[3:]),
    backward=_adapted_backward,
)
def adapted(x: Tensor, weight: Tensor, bias: Tensor | None, xa: Tensor, b: Tensor) -> Tensor:
    """x·Wᵀ + bias + xa·Bᵀ, the last part added in place: (P, O)."""
    return F.linear(x, weight, bias).addmm_(xa, b.t())


def _extended(gate: Tensor, up: Tensor, b_gate: Tensor, b_up: Tensor) -> Tensor:
    upper = torch.cat((gate, b_gate, torch.zeros_like(b_up)), dim=1)
    return torch.cat((upper, torch.cat((up, torch.zeros_like(b_gate), b_up), dim=1)))


def _pair_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up, xa, b_gate, b_up = ctx.saved_tensors
    grad_x, grad_xa = (grad @ _extended(gate, up, b_gate, b_up)).split(
        (gate.shape[1], xa.shape[1]), dim=1
    )
    (of_gate, of_up), rank = grad.split((gate.shape[0], up.shape[0]), dim=1), b_gate.shape[1]
    grad_b_gate, grad_b_up = of_gate.t() @ xa[:, :rank], of_up.t() @ xa[:, rank:]
    return grad_x, None, None, grad_xa, grad_b_gate, grad_b_up


@operator(
    shape=lambda x, gate, up, *_: x.new_empty((x.shape[0], gate.shape[0] + up.shape[0])),
    keep=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
    backward=_pair_backward,
)
def adapted_pair(
    x: Tensor, gate: Tensor, up: Tensor, xa: Tensor, b_gate: Tensor, b_up: Tensor
) -> Tensor:
    """Both at once: [x xa] · [gate B 0 ; up 0 B]ᵀ, (P, 2·O). Copying two frozen weights costs less
    than another pass over what so many tokens make of them."""
    return torch.cat((x, xa), dim=1) @ _extended(gate, up, b_gate, b_up).t()


# -- the adapters of a policy ---------------------------------------------------------------------


def add_lora(policy: nn.Module, options: TrainerConfig) -> None:
    """Freeze the policy and add adapters to its linear layers, in place."""
    # Log-probs are computed from the output layer's weight in chunks, not through the layer.
    inner: Any = getattr(policy, "inner", None)
    output = getattr(policy, "lm_head", None) if inner is None else inner.get_output_embeddings()
    linear = {
        n: m for n, m in policy.named_modules() if isinstance(m, nn.Linear) and m is not output
    }
    found = {name.rpartition(".")[2] for name in linear}
    missing = [t for t in options.lora_targets if t not in found]
    # Of a model that transformers runs the usual layers alone, as ever.
    usual = LINEAR_LAYERS if inner is not None else (*LINEAR_LAYERS, *FUSED_LAYERS)
    targets = options.lora_targets or usual
    require(
        (
            not missing,
            f"trainer.lora_targets {missing}: no such linear layer of the blocks (the output "
            f"matrix has no adapter); known: {sorted(found)}",
        ),
        (
            found & set(targets),
            "trainer.lora_rank: the model has none of the usual linear layers; name some in "
            f"trainer.lora_targets: {sorted(found)}",
        ),
    )
    policy.requires_grad_(False)
    # The same seed gives the same adapters on every rank.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        for name, layer in linear.items():
            parent, _, last = name.rpartition(".")
            if last in targets:
                setattr(policy.get_submodule(parent), last, LoraLinear(layer, options))
    if inner is not None:
        form: Any = policy.format
        _refuse_renamed(policy, set(form.names))


@contextmanager
def without_dropout(policy: nn.Module) -> Iterator[None]:
    """For whatever is not a training pass. Adapters alone have dropout; a model's own stays off."""
    adapted = (m for m in policy.modules() if isinstance(m, LoraLinear))
    noisy = [m.lora_dropout for m in adapted if m.lora_dropout.training]
    for module in noisy:
        module.eval()
    try:
        yield
    finally:
        for module in noisy:
            module.train()


def _refuse_renamed(policy: nn.Module, names: set[str]) -> None:
    """An adapter is added to the checkpoint's weight of the same name, so there must be one."""
    for own in (checkpoint_name(n) for n, _ in policy.named_parameters() if _BASE in n):
        require(
            (
                own in names,
                f"trainer.lora_targets: '{own}' has another name in the model's files; "
                "leave that layer out",
            )
        )


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """A base parameter's name without peft's wrapper."""
    return name.replace(_BASE, ".")


def checkpoint_name(name: str) -> str:
    """A parameter's name without the prefixes of modules that wrap a foreign or adapted model."""
    return plain_name(name.removeprefix("inner."))


def name_now(name: str, known: Container[str]) -> str:
    """The policy's name of what it left behind, which had a prefix as long as transformers ran it:
    the packed decoder may have learned its family since."""
    return name if name in known else name.replace("inner.", "", 1)


def merged(
    policy: nn.Module,
    name: str,
    weight: Tensor,
    gather: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """The whole weight with its adapter added, if it has one; all ranks must enter."""
    if _BASE not in name or not name.endswith(".weight"):
        return weight
    layer = policy.get_submodule(name[: name.index(_BASE)])
    assert isinstance(layer, LoraLinear)
    a, b = (gather(t.detach()) for t in layer.factors())
    return merged_weight(weight, a, b, layer.scale, dtype)


def adapter_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """The adapters by the policy's own names."""
    return {n: p.detach() for n, p in policy.named_parameters() if is_adapter(n)}


def peft_name(name: str) -> str:
    """An adapter's name in a PEFT directory and in a published version."""
    return PREFIX + name.removeprefix("inner.").replace(f".{ADAPTER}.", ".")


def published_adapter(
    policy: nn.Module,
    options: TrainerConfig,
    dtype: torch.dtype,
    gather: Callable[[Tensor], Tensor],
) -> list[tuple[str, Tensor]]:
    """A version as its adapter alone: what changes from one version to the next."""
    scale = torch.tensor([options.lora_alpha / options.lora_rank], dtype=torch.float32)
    adapters = (
        (peft_name(name), gather(t).to(dtype=dtype, device="cpu", copy=True).contiguous())
        for name, t in adapter_tensors(policy).items()
    )
    return [(SCALE, scale), *adapters]


class MergedVersion:
    """A published adapter on the base in a model directory, as whole weights."""

    def __init__(self, sealed: SealedWeights, base: Path) -> None:
        self.version = sealed.version
        self._sealed, self._base = sealed, HfDirectory(base)
        self._adapted, self._scale = set(sealed.names()), float(sealed.tensor(SCALE))

    def names(self) -> list[str]:
        return list(self._base.names())

    def tensor(self, name: str) -> Tensor:
        """base + (alpha/rank)·B·A."""
        weight = self._base.tensor(name)
        down = f"{PREFIX}{name.removesuffix('.weight')}.lora_A.weight"
        if down not in self._adapted:
            return weight
        a, b = self._sealed.tensor(down), self._sealed.tensor(down.replace("lora_A", "lora_B"))
        delta = self._scale * (b.float() @ a.float()).to(weight.device)
        return (weight.float() + delta).to(weight.dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.tensor(name)) for name in self.names())


def is_published_adapter(sealed: SealedWeights) -> bool:
    return SCALE in sealed.names()


def whole_version(sealed: Any, base: str | Path) -> Any:
    """A sealed version as whole weights, whichever way it was published."""
    return MergedVersion(sealed, Path(base)) if is_published_adapter(sealed) else sealed


def load_published_adapter(policy: nn.Module, sealed: SealedWeights) -> None:
    """Continue from a published version."""
    require(
        (
            is_published_adapter(sealed),
            "a published version has its adapters merged; resume a checkpoint",
        )
    )
    load_adapter_tensors(
        policy, {name: sealed.tensor(peft_name(name)) for name in adapter_tensors(policy)}
    )


@torch.no_grad()
def load_adapter_tensors(policy: nn.Module, tensors: dict[str, Tensor]) -> None:
    adapters = adapter_tensors(policy)
    found = {name_now(name, adapters): tensor for name, tensor in tensors.items()}
    if other := sorted(found.keys() ^ adapters.keys()):
        raise UserError(
            "the adapters that are there are of other layers than trainer.lora_targets has now: "
            f"{other[0]} is of one of the two alone"
        )
    for name, p in adapters.items():
        p.copy_(like_shard(found[name], p))


def save_adapter(
    directory: Path, adapters: dict[str, Tensor], options: TrainerConfig, base: str
) -> None:
    """As a PEFT directory. The adapters are whole, by the policy's names."""
    write_adapter(
        directory,
        {peft_name(name): tensor for name, tensor in adapters.items()},
        rank=options.lora_rank,
        alpha=options.lora_alpha,
        dropout=options.lora_dropout,
        base=base,
    )
