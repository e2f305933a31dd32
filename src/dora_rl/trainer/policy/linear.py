"""Linear layers of the decoder: plain ones, and frozen ones with a low-rank adapter.

Weights stay in their own dtype and are cast to the dtype of the activations where they are used.
Never computes a gradient of a weight that carries an adapter. Invariants: a policy computes with
exactly what it publishes, adapters or merged weights in the compute dtype; and with the same
numbers compiled or not, with gradients or without.

The products with adapters are operators of their own, which the compiler leaves alone: it would
add an adapter's part to the base's before or after rounding, as it finds fastest for each graph,
and a frozen twin would not round as the policy does. What lies around them is fused as usual.

Shapes: T tokens, I inputs, O outputs, R ranks of all adapters that share an input.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dora_rl.config import TrainerConfig

ADAPTER = "default"
# Two matrices with that many times more outputs than inputs add their adapters inside the product:
# longer rows to read, but no second pass over the outputs.
_WIDE = 2


class Linear(nn.Linear):
    """A linear layer that casts its float32 weight to the activations' dtype."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


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

    @property
    def beside(self) -> bool:
        """Whether it is computed as base and adapter. Noise has no merged form."""
        return not self.merges or self.noisy

    def forward(self, x: Tensor) -> Tensor:
        if not self.beside:
            return self._merged(x)
        if not isinstance(self.base_layer, Linear):  # of a model that transformers runs
            delta = self.lora_B[ADAPTER](self.lora_A[ADAPTER](self.lora_dropout(x)))
            return self.base_layer(x) + delta * self.scale
        return self.add_to_base(x, low_rank(self.lora_dropout(x), self.down(x.dtype)))

    def down(self, dtype: torch.dtype) -> Tensor:
        return self.factors()[0].to(dtype)

    def up(self, dtype: torch.dtype) -> Tensor:
        """B · alpha/rank from and to numbers of `dtype`: what an engine makes of a version."""
        return (self.factors()[1].to(dtype).float() * self.scale).to(dtype)

    def add_to_base(self, x: Tensor, xa: Tensor) -> Tensor:
        base = self.base_layer
        bias = None if base.bias is None else base.bias.to(x.dtype)
        return adapted(x, base.weight.to(x.dtype), bias, xa, self.up(x.dtype))

    def _merged(self, x: Tensor) -> Tensor:
        a, b = self.factors()
        with torch.no_grad():
            dtype = _compute_dtype(x)
            whole = merged_weight(self.base_layer.weight, a, b, self.scale, dtype)
        bias = self.base_layer.bias
        y = F.linear(x, whole, None if bias is None else bias.to(dtype))
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
    if not isinstance(layer, LoraLinear) or layer.noisy or not layer.beside:
        return False
    return isinstance(layer.base_layer, Linear)


def _is_wide(a: nn.Linear, b: nn.Linear) -> bool:
    same = a.out_features == b.out_features and a.bias is None and b.bias is None
    return same and a.out_features + b.out_features > _WIDE * a.in_features


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer computes in: x's own, unless autocast says otherwise."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@torch.library.custom_op("dora_rl::merged_weight", mutates_args=())
def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """base + scale·B·A in float32, from and to numbers of `dtype`: those a policy computes with."""
    weight, a, b = (t.to(dtype).float() for t in (weight, a, b))
    with torch.autocast(weight.device.type, enabled=False):
        return (weight + scale * (b @ a)).to(dtype)


@merged_weight.register_fake
def _(weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    del a, b, scale
    return torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)


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
        x, a, b = ctx.saved_tensors
        (grad,) = grads
        x_TI, grad_TO = x.flatten(0, -2).to(grad.dtype), grad.flatten(0, -2)
        grad_b = grad_TO.t() @ (x_TI @ a.to(grad.dtype).t())
        grad_a = (grad_TO @ b.to(grad.dtype)).t() @ x_TI
        scale = ctx.scale
        return grad, None, grad_a.to(a.dtype) * scale, grad_b.to(b.dtype) * scale, None


# -- operators ------------------------------------------------------------------------------------


@torch.library.custom_op("dora_rl::low_rank", mutates_args=())
def low_rank(x: Tensor, a: Tensor) -> Tensor:
    """x (T, I) down to the ranks of every adapter that shares it: (T, R)."""
    return x @ a.t()


@low_rank.register_fake
def _(x: Tensor, a: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], a.shape[0]))


def _keep_both(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _low_rank_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
    x, a = ctx.saved_tensors
    return grad @ a if ctx.needs_input_grad[0] else None, grad.t() @ x


low_rank.register_autograd(_low_rank_backward, setup_context=_keep_both)


@torch.library.custom_op("dora_rl::adapted", mutates_args=())
def adapted(x: Tensor, weight: Tensor, bias: Tensor | None, xa: Tensor, b: Tensor) -> Tensor:
    """x·Wᵀ + bias + xa·Bᵀ, the last part added in place: (T, O)."""
    return F.linear(x, weight, bias).addmm_(xa, b.t())


@adapted.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, xa: Tensor, b: Tensor) -> Tensor:
    del bias, xa, b
    return x.new_empty((x.shape[0], weight.shape[0]))


def _keep_adapted(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """x is of no use: W has no gradient."""
    del output
    _, weight, _, xa, b = inputs
    ctx.save_for_backward(weight, xa, b)


def _adapted_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, xa, b = ctx.saved_tensors
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    return grad_x, None, None, grad @ b, grad.t() @ xa


adapted.register_autograd(_adapted_backward, setup_context=_keep_adapted)


@torch.library.custom_op("dora_rl::adapted_pair", mutates_args=())
def adapted_pair(
    x: Tensor, gate: Tensor, up: Tensor, xa: Tensor, b_gate: Tensor, b_up: Tensor
) -> Tensor:
    """Both at once: [x xa] · [gate B 0 ; up 0 B]ᵀ, (T, 2·O). Copying two frozen weights costs less
    than another pass over what so many tokens make of them."""
    return torch.cat((x, xa), dim=1) @ _extended(gate, up, b_gate, b_up).t()


def _extended(gate: Tensor, up: Tensor, b_gate: Tensor, b_up: Tensor) -> Tensor:
    upper = torch.cat((gate, b_gate, torch.zeros_like(b_up)), dim=1)
    return torch.cat((upper, torch.cat((up, torch.zeros_like(b_gate), b_up), dim=1)))


@adapted_pair.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, xa: Tensor, b_gate: Tensor, b_up: Tensor) -> Tensor:
    del xa, b_gate, b_up
    return x.new_empty((x.shape[0], gate.shape[0] + up.shape[0]))


def _keep_pair(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[1:])


def _pair_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gate, up, xa, b_gate, b_up = ctx.saved_tensors
    grad_x, grad_xa = (grad @ _extended(gate, up, b_gate, b_up)).split(
        (gate.shape[1], xa.shape[1]), dim=1
    )
    (of_gate, of_up), rank = grad.split((gate.shape[0], up.shape[0]), dim=1), b_gate.shape[1]
    grad_b_gate, grad_b_up = of_gate.t() @ xa[:, :rank], of_up.t() @ xa[:, rank:]
    return grad_x, None, None, grad_xa, grad_b_gate, grad_b_up


adapted_pair.register_autograd(_pair_backward, setup_context=_keep_pair)
