"""RMS norm and rotary rotation with hand-written gradients, for float32 on a CPU.

There each pass over memory costs, and autograd's composition makes two to three times as many as
needed. Where layers are compiled, the plain formulas beside them are, except for sums over a row:
the compiler cuts those up as it finds fastest for each graph, with gradients or without, and a
frozen twin would not round as the policy does. They are operators of their own here, which it
leaves alone. Invariant: each function equals its plain form (the oracle in the tests), values and
gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_lean(x: Tensor) -> bool:
    """Whether the hand-written form is the faster one here. What is compiled is fused anyway."""
    if torch.compiler.is_compiling():
        return False
    return x.device.type == "cpu" and x.dtype == torch.float32


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """y = x·s·w, s = (mean x² + ε)^-½:  dx = g·w·s − x·s³·mean(g·w·x),  dw = Σ g·x·s."""
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        gx = (grad * x).view(-1, width)
        dot = torch.mv(gx, weight).view(scale.shape)
        grad_weight = torch.mv(gx.t(), scale.reshape(-1))
        coefficient = dot.mul_(scale.pow(3)).mul_(-1.0 / width)
        grad_x = (grad * weight).mul_(scale).addcmul_(x, coefficient)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""
    if is_lean(x):
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[return-value]
    # As in transformers: normalise in float32, round, then scale.
    scale = (row_norm(x).square() / x.shape[-1] + eps).rsqrt()
    return (x * scale).to(x.dtype) * weight.to(x.dtype)


@torch.library.custom_op("dora_rl::row_norm", mutates_args=())
def row_norm(x: Tensor) -> Tensor:
    """The Euclidean norm of each row in float32, (..., 1)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide(x))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@row_norm.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=_wide(x))


def _keep_norm(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _row_norm_backward(ctx: Any, grad: Tensor) -> Tensor:
    """d‖x‖/dx = x/‖x‖, and 0 for a row of zeros."""
    x, norm = ctx.saved_tensors
    return (x * (grad / norm.clamp_min(torch.finfo(norm.dtype).tiny))).to(x.dtype)


row_norm.register_autograd(_row_norm_backward, setup_context=_keep_norm)


@torch.library.custom_op("dora_rl::row_softmax", mutates_args=())
def row_softmax(x: Tensor) -> Tensor:
    """The softmax of each row in float32."""
    return x.softmax(-1, dtype=torch.float32)


@row_softmax.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def _keep_softmax(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dtype = inputs[0].dtype


def _row_softmax_backward(ctx: Any, grad: Tensor) -> Tensor:
    """dL/dx = p·(g − Σ g·p)."""
    (p,) = ctx.saved_tensors
    return (p * (grad - (grad * p).sum(-1, keepdim=True))).to(ctx.dtype)


row_softmax.register_autograd(_row_softmax_backward, setup_context=_keep_softmax)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, -1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, 1.0), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    out = torch.empty_like(x)
    (a, b), (c, d) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=sign)
    torch.mul(b, cos, out=d).addcmul_(a, sin, value=-sign)
    return out


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pair (x[i], x[i + D/2]) by the token's angle: (a·c − b·s, b·c + a·s).

    In float32 and rounded once, as engines do: cosines in half precision are exact near position 0
    only, so that two programs would differ more the later a token is.
    """
    if is_lean(x_THD):
        return _Rotate.apply(x_THD, cos, sin)  # type: ignore[return-value]
    a, b = x_THD.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_THD.dtype)
