"""Rotary position embedding: the inverse frequencies of each scaling rule and their tables.

Formulas, with d the width that is rotated, i = 0, 2, .. d - 2 and f_i = theta^(-i/d):
    default   f_i
    linear    f_i / factor
    llama3    f_i for short wavelengths, f_i / factor for long ones, blended between
    yarn      f_i below `beta_fast` rotations kept, above `beta_slow` divided, a ramp between;
              cos and sin are scaled by the attention factor
    none      0: every position is position 0
    longrope  f_i / short factor of i; cos and sin are scaled by the attention factor. Texts longer
              than those of the pre-training would have other factors, from their beginning on

The width is the whole head, or its beginning. An engine rotates pairs that are half a head apart,
whatever the family: heads whose pairs lie otherwise it has in another order (`head_order`), queries
and keys alike, which leaves their products as they are; a pair that is not rotated has the angle 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from dora_rl.model.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """[rotated width / 2] frequencies and the factor on cos and sin."""
    width = rope.width(head_dim)
    freq = 1.0 / rope.theta ** (torch.arange(0, width, 2).float() / width)
    if rope.kind == "none":
        return torch.zeros_like(freq), 1.0
    if rope.kind == "linear":
        return freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, width)
    if rope.kind == "longrope":
        return _longrope(rope, width)
    return freq, 1.0


def _llama3(rope: RopeSpec, freq: Tensor) -> Tensor:
    wavelength = 2 * math.pi / freq
    low, high = rope.low_freq_factor, rope.high_freq_factor
    long_from, short_to = rope.context_original / low, rope.context_original / high
    ramp = (rope.context_original / wavelength - low) / (high - low)
    blended = (1 - ramp) * freq / rope.factor + ramp * freq
    scaled = torch.where(wavelength > long_from, freq / rope.factor, freq)
    between = ~(wavelength < short_to) & ~(wavelength > long_from)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    def dimension(num_rotations: float) -> float:
        length = rope.context_original / (num_rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    def scale(factor: float, mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    position_freq = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    kept = 1.0 - ramp
    freq = (1.0 / (rope.factor * position_freq)) * (1 - kept) + (1.0 / position_freq) * kept
    if rope.attention_factor is not None:
        return freq, float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return freq, scale(rope.factor, rope.mscale) / scale(rope.factor, rope.mscale_all_dim)
    return freq, scale(rope.factor)


def _longrope(rope: RopeSpec, width: int) -> tuple[Tensor, float]:
    exponent = torch.arange(0, width, 2).float() / width
    freq = 1.0 / (torch.tensor(rope.short_factors) * rope.theta**exponent)
    if rope.attention_factor is not None:
        return freq, float(rope.attention_factor)
    longer = math.log(rope.factor) / math.log(rope.context_original) if rope.factor > 1 else 0.0
    return freq, math.sqrt(1.0 + longer)


def head_order(rope: RopeSpec, head_dim: int) -> list[int] | None:
    """Which number of a checkpoint's head stands where in an engine's; None: all where they are."""
    width = rope.width(head_dim)
    if width == head_dim and not rope.interleaved:
        return None
    if rope.interleaved:
        first, second = range(0, width, 2), range(1, width, 2)
    else:
        first, second = range(width // 2), range(width // 2, width)
    middle = width + (head_dim - width) // 2
    return [*first, *range(width, middle), *second, *range(middle, head_dim)]


def reordered(tensor: Tensor, num_heads: int, order: list[int] | None) -> Tensor:
    """The rows of a tensor of a checkpoint with those of its first heads in `order`."""
    if order is None or not num_heads:
        return tensor
    dim = len(order)
    heads = tensor[: num_heads * dim].unflatten(0, (num_heads, dim))[:, order]
    return torch.cat((heads.flatten(0, 1), tensor[num_heads * dim :]))


def rope_tables(rope: RopeSpec, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and signed sin, [position, head_dim] in float32.

    Rotation is `x * cos + roll(x, d / 2) * sin`, so the first half of sin carries the minus sign.
    """
    freq, attention = inverse_frequencies(rope, head_dim)
    angle = torch.arange(num_positions).float()[:, None] * freq[None, :]
    cos, sin = angle.cos() * attention, angle.sin() * attention
    if (still := head_dim // 2 - len(freq)) > 0:
        cos, sin = functional.pad(cos, (0, still), value=1.0), functional.pad(sin, (0, still))
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotation(position_T: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, 1, D/2), in float32 whatever the model computes in."""
    angle = position_T[:, None, None].float() * inv_freq
    return angle.cos() * scale, angle.sin() * scale
