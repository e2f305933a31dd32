"""The clipped-ratio family: PPO's surrogate as GRPO, Dr.GRPO, DAPO, REINFORCE++ and PPO use it,
its decoupled form, and LongCat's triplet clip.

Pure. r_t = π_θ(t) / π_old(t) throughout; the gradient flows through π_θ only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dora_rl.config import AlgorithmConfig
from dora_rl.trainer.losses.inputs import LossInputs, LossOutput, ratio_of


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
