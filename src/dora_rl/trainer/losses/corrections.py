"""Weights for the gap between the policy that sampled and the policy that is taken as old.

Pure, and free to combine with any loss: each correction gives a factor per token, they multiply,
and none carries a gradient. ρ_t = π_num(t)/π_rollout(t), where the numerator is the `old` policy
computed by the training engine, or, with `correction_numerator = "current"`, the policy being
trained. Invariant: where the two policies agree every factor is 1.

Masking zeroes a token's loss; denominators still count the token (see `losses.aggregate`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dora_rl.config import AlgorithmConfig
from dora_rl.trainer.losses.inputs import LossInputs

Correction = Callable[[Tensor, LossInputs, AlgorithmConfig], Tensor]


def token_tis(log_rho_T: Tensor, inputs: LossInputs, o: AlgorithmConfig) -> Tensor:
    """min(ρ_t, C): token-level truncated importance sampling, C = token_ratio_max."""
    return log_rho_T.exp().clamp(max=o.token_ratio_max)


def sequence_tis(log_rho_T: Tensor, inputs: LossInputs, o: AlgorithmConfig) -> Tensor:
    """min(Π_t ρ_t, C) for the whole sequence, C = sequence_ratio_max."""
    return inputs.spread_T(inputs.sum_S(log_rho_T).exp().clamp(max=o.sequence_ratio_max))


def token_mask(log_rho_T: Tensor, inputs: LossInputs, o: AlgorithmConfig) -> Tensor:
    """1[c ≤ ρ_t ≤ C]: tokens outside are dropped; bounds token_ratio_min and _max."""
    return _inside(log_rho_T.exp(), o.token_ratio_min, o.token_ratio_max)


def sequence_mask(log_rho_T: Tensor, inputs: LossInputs, o: AlgorithmConfig) -> Tensor:
    """1[c ≤ Π_t ρ_t ≤ C]: sequences outside are dropped; sequence_ratio_min and _max."""
    rho_S = inputs.sum_S(log_rho_T).exp()
    return inputs.spread_T(_inside(rho_S, o.sequence_ratio_min, o.sequence_ratio_max))


def token_mis(log_rho_T: Tensor, inputs: LossInputs, o: AlgorithmConfig) -> Tensor:
    """ρ_t · 1[ρ_t ≤ C]: masked importance sampling per token."""
    rho = log_rho_T.exp()
    return torch.where(rho <= o.token_ratio_max, rho, 0.0)


def sequence_mis(log_rho_T: Tensor, inputs: LossInputs, o: AlgorithmConfig) -> Tensor:
    """Π_t ρ_t · 1[Π_t ρ_t ≤ C]: masked importance sampling per sequence."""
    rho_S = inputs.sum_S(log_rho_T).exp()
    return inputs.spread_T(torch.where(rho_S <= o.sequence_ratio_max, rho_S, 0.0))


def geometric_mask(log_rho_T: Tensor, inputs: LossInputs, o: AlgorithmConfig) -> Tensor:
    """1[c ≤ (Π_t ρ_t)^(1/|y|) ≤ C]: rejection by the geometric mean; geometric_ratio_min, _max."""
    rho_S = inputs.mean_S(log_rho_T).exp()
    return inputs.spread_T(_inside(rho_S, o.geometric_ratio_min, o.geometric_ratio_max))


def hierarchical(log_rho_T: Tensor, inputs: LossInputs, o: AlgorithmConfig) -> Tensor:
    """Sequence mask by geometric mean, times token mask: 1[ḡ_i ∈ [c_g, C_g]] · 1[ρ_t ∈ [c, C]]."""
    return geometric_mask(log_rho_T, inputs, o) * token_mask(log_rho_T, inputs, o)


def _inside(x: Tensor, low: float, high: float) -> Tensor:
    return ((x >= low) & (x <= high)).to(x.dtype)


CORRECTIONS: dict[str, Correction] = {
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "token_mask": token_mask,
    "sequence_mask": sequence_mask,
    "token_mis": token_mis,
    "sequence_mis": sequence_mis,
    "geometric_mask": geometric_mask,
    "hierarchical": hierarchical,
}


def correction_weight(inputs: LossInputs, options: AlgorithmConfig) -> Tensor | None:
    """The product of the chosen corrections (T,), without a gradient; None if none is chosen."""
    if not options.corrections:
        return None
    current = options.correction_numerator == "current"
    numerator = inputs.logprobs_T if current else inputs.old_logprobs_T
    log_rho = (numerator - inputs.rollout_logprobs_T).detach()
    weight = torch.ones_like(log_rho)
    for name in options.corrections:
        weight = weight * CORRECTIONS[name](log_rho, inputs, options)
    return weight
