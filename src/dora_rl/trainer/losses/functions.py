"""The losses themselves. Pure; r_t = π_θ(t) / π_old(t), and the gradient flows through π_θ only.

The clipped-ratio family: PPO's surrogate as GRPO, Dr.GRPO, DAPO, REINFORCE++ and PPO use it, its
decoupled form, LongCat's triplet clip, and GSPO, whose ratio is that of whole sequences. The
score-function family: the gradient is a weight times ∇ log π_θ, so no token's is clipped away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dora_rl.config import AlgorithmConfig
from dora_rl.trainer.losses.inputs import LOG_RATIO_MAX, LossInputs, LossOutput, ratio_of


def _bounds(options: AlgorithmConfig) -> tuple[float, float]:
    assert options.clip_low is not None and options.clip_high is not None, "recipe not resolved"
    return 1.0 - options.clip_low, 1.0 + options.clip_high


def surrogate(
    ratio_T: Tensor, advantage_T: Tensor, options: AlgorithmConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """−min(r·A, clip(r, 1−ε_low, 1+ε_high)·A), with marks of what was clipped.

    With `dual_clip` c, where A < 0 the loss is at most −c·A. A c of 0 is none.
    """
    low, high = _bounds(options)
    loss = -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(low, high) * advantage_T)
    clipped_low = (ratio_T < low) & (advantage_T < 0)
    clipped_high = (ratio_T > high) & (advantage_T > 0)
    if options.dual_clip:
        capped = torch.minimum(loss, -options.dual_clip * advantage_T)
        loss = torch.where(advantage_T < 0, capped, loss)
        clipped_high |= (ratio_T > options.dual_clip) & (advantage_T < 0)
    return loss, clipped_low, clipped_high


def clipped(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """loss_t = −min(r_t·A_t, clip(r_t, 1−ε_low, 1+ε_high)·A_t),  r_t = π_θ(t)/π_old(t)."""
    ratio = ratio_of(inputs.logprobs_T, inputs.old_logprobs_T)
    return LossOutput(*surrogate(ratio, inputs.advantages_T, options))


def decoupled(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """loss_t = −sg[π_prox(t)/π_behav(t)] · min(r_t·A_t, clip(r_t, 1−ε_low, 1+ε_high)·A_t).

    r_t = π_θ(t)/π_prox(t): the trust region is around the recent proximal policy (`old`), the
    behaviour policy (the rollout's) enters as an importance weight of at most
    `behaviour_ratio_max` (0: no cap).
    """
    weight = ratio_of(inputs.old_logprobs_T, inputs.rollout_logprobs_T)
    if options.behaviour_ratio_max:
        weight = weight.clamp(max=options.behaviour_ratio_max)
    ratio = ratio_of(inputs.logprobs_T, inputs.old_logprobs_T)
    loss, low, high = surrogate(ratio, inputs.advantages_T, options)
    return LossOutput(weight.detach() * loss, low, high)


def triplet(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """loss_t = −min(r_t, 1+ε_pos_high)·A_t               where A_t ≥ 0
    loss_t = −clip(r_t, 1−ε_neg_low, ε_neg_high)·A_t     where A_t < 0

    LongCat's three bounds: ε_neg_low is `clip_low`, ε_pos_high is `clip_high`, and ε_neg_high, the
    cap that keeps a negative sample's ratio from exploding, is `dual_clip`.
    """
    low, high = _bounds(options)
    assert options.dual_clip, "recipe not resolved"
    ratio = ratio_of(inputs.logprobs_T, inputs.old_logprobs_T)
    advantage = inputs.advantages_T
    negative = advantage < 0
    bounded = torch.where(negative, ratio.clamp(low, options.dual_clip), ratio.clamp(max=high))
    clipped_high = torch.where(negative, ratio > options.dual_clip, ratio > high)
    return LossOutput(-bounded * advantage, negative & (ratio < low), clipped_high)


def gspo(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """loss_t = −min(s_i·A_t, clip(s_i, 1−ε_low, 1+ε_high)·A_t)  for every token t of sequence i,

    s_i = (π_θ(y_i)/π_old(y_i))^(1/|y_i|) = exp(mean_t(log π_θ(t) − log π_old(t))).
    With one advantage per sequence and sequence-mean aggregation this is the paper's objective.
    """
    log_ratio_S = inputs.mean_S(inputs.logprobs_T - inputs.old_logprobs_T)
    ratio_T = inputs.spread_T(log_ratio_S.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp())
    return LossOutput(*surrogate(ratio_T, inputs.advantages_T, options))


def reinforce(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """loss_t = −A_t · log π_θ(t).

    With leave-one-out advantages and per-sequence sums this is RLOO. Data from older versions is
    corrected by weights (see `corrections`), not by a ratio in the loss.
    """
    return LossOutput(-inputs.advantages_T * inputs.logprobs_T)


def cispo(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """loss_t = −sg[clip(r_t, 1−ε_low, 1+ε_high)] · A_t · log π_θ(t),  r_t = π_θ(t)/π_old(t).

    The clipped ratio is a weight, not a gate: every token keeps a gradient.
    """
    low, high = _bounds(options)
    ratio = ratio_of(inputs.logprobs_T, inputs.old_logprobs_T).detach()
    loss = -ratio.clamp(low, high) * inputs.advantages_T * inputs.logprobs_T
    return LossOutput(loss, ratio < low, ratio > high)
