"""Rotary positions: frequencies from a Hugging Face config, and the angles of a pack.

Invariant: the same cosines as transformers computes for `default`, `linear` and `llama3`; other
kinds are refused here and run through transformers instead.

Shapes: T tokens, D head size; the two halves of D are the two coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ROPE_KINDS = ("default", "linear", "llama3")


def frequencies(head_dim: int, theta: float, rope: Mapping[str, Any]) -> Tensor:
    """Inverse frequencies (D/2,) in float32."""
    kind = str(rope.get("rope_type", "default"))
    assert kind in ROPE_KINDS
    inv = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if kind == "linear":
        return inv / float(rope["factor"])
    if kind == "llama3":
        return _llama3(inv, rope)
    return inv


def _llama3(inv: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Low frequencies are stretched by `factor`, high ones kept, the band between blended."""
    factor, low = float(rope["factor"]), float(rope["low_freq_factor"])
    high, context = float(rope["high_freq_factor"]), float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv
    blend = (context / wavelength - low) / (high - low)
    mixed = (1 - blend) * inv / factor + blend * inv
    out = torch.where(wavelength > context / low, inv / factor, inv)
    middle = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(middle, mixed, out)


def rotation(position_T: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, 1, D/2), in float32 whatever the model computes in."""
    angle = position_T[:, None, None].float() * inv_freq
    return angle.cos() * scale, angle.sin() * scale
