"""Divergence from a reference, and the loss of a value head. Pure.

The three estimators of KL(π_θ‖π_ref) from samples of π_θ, with d = log π_ref − log π_θ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dora_rl.trainer.losses.inputs import LOG_RATIO_MAX


def kl_k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """k1 = log π_θ − log π_ref: unbiased, high variance, may be negative."""
    return logprobs_T - ref_logprobs_T


def kl_k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """k2 = (log π_θ − log π_ref)² / 2: biased, low variance; its gradient is that of the KL."""
    return 0.5 * (logprobs_T - ref_logprobs_T).square()


def kl_k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """k3 = exp(d) − d − 1 with d = log π_ref − log π_θ: unbiased, never negative.

    d is at most LOG_RATIO_MAX, so that a token which the policy has given up does not overflow.
    """
    d = (ref_logprobs_T - logprobs_T).clamp(max=LOG_RATIO_MAX)
    # expm1 keeps the digits that exp(d) − 1 loses for small d.
    return torch.expm1(d) - d


KL = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None
) -> Tensor:
    """loss_t = ½·max((V − R)², (V_old + clip(V − V_old, −c, c) − R)²); without c (or with c = 0)
    just ½(V − R)²."""
    plain = (values_T - returns_T).square()
    if not clip:
        return 0.5 * plain
    near = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (near - returns_T).square())
