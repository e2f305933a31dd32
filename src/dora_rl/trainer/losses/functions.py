"""The formulas: losses, divergences, weights for off-policy samples, advantages. Pure.

A loss sees r_t = π_θ(t) / π_old(t), and the gradient flows through π_θ only.
The clipped-ratio family: PPO's surrogate as GRPO, Dr.GRPO, DAPO, REINFORCE++ and PPO use it, its
decoupled form, LongCat's triplet clip, and GSPO, whose ratio is that of whole sequences. The
score-function family: the gradient is a weight times ∇ log π_θ, so no token's is clipped away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dora_rl.config import AlgorithmConfig
from dora_rl.trainer.losses.inputs import LOG_RATIO_MAX, LossInputs, LossOutput, ratio_of

_EPS = 1e-4  # TRL's and the papers' guard under the standard deviation


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
        loss = torch.where(
            advantage_T < 0, torch.minimum(loss, -options.dual_clip * advantage_T), loss
        )
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
    weight = weight.clamp(max=options.behaviour_ratio_max or math.inf)
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
    corrected by weights (see `CORRECTIONS`), not by a ratio in the loss.
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


# -- divergence from a reference, and the loss of a value head ------------------------------------
#
# The three estimators of KL(π_θ‖π_ref) from samples of π_θ:
#
#     k1  log π_θ − log π_ref          unbiased, high variance, may be negative
#     k2  (log π_θ − log π_ref)² / 2   biased, low variance; its gradient is that of the KL
#     k3  exp(d) − d − 1               unbiased, never negative; d = log π_ref − log π_θ


def kl_k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """k3 = exp(d) − d − 1 with d = log π_ref − log π_θ: unbiased, never negative.

    d is at most LOG_RATIO_MAX, so that a token which the policy has given up does not overflow.
    """
    d = (ref_logprobs_T - logprobs_T).clamp(max=LOG_RATIO_MAX)
    # expm1 keeps the digits that exp(d) − 1 loses for small d.
    return torch.expm1(d) - d


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda logprobs_T, ref_logprobs_T: logprobs_T - ref_logprobs_T,
    "k2": lambda logprobs_T, ref_logprobs_T: 0.5 * (logprobs_T - ref_logprobs_T).square(),
    "k3": kl_k3,
}


def distilled_advantages(inputs: LossInputs, options: AlgorithmConfig) -> Tensor:
    """A_t − β·clip(log π_rollout(t) − log q(t), −c, c), where q is the teacher.

    The log-ratio of a sampled token is an estimate of KL(π‖q) at its place (k1), so a policy that
    follows these advantages goes down that divergence. β is `distill_coef`, c is `distill_clip`.
    """
    assert inputs.teacher_logprobs_T is not None and options.distill_coef is not None
    gap_T = inputs.rollout_logprobs_T - inputs.teacher_logprobs_T
    if options.distill_clip:
        gap_T = gap_T.clamp(-options.distill_clip, options.distill_clip)
    return inputs.advantages_T - options.distill_coef * gap_T


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


# -- weights for the gap between the policy that sampled and the one that is taken as old ---------
#
# Free to combine with any loss: each correction gives a factor per token, they multiply, and none
# carries a gradient. ρ_t = π_num(t)/π_rollout(t), where the numerator is the `old` policy computed
# by the training engine, or, with `correction_numerator = "current"`, the policy being trained.
# Where the two policies agree every factor is 1. Masking zeroes a token's loss; denominators still
# count the token (see `registry.Objective`).
#
# A factor is one of three functions of a ratio ρ over one of three spans. Their bounds c and C are
# `{span}_ratio_min` and `{span}_ratio_max`.
#
#     token      ρ_t                    tis   min(ρ, C)       truncated importance sampling
#     sequence   Π_t ρ_t                mis   ρ · 1[ρ ≤ C]    masked importance sampling
#     geometric  (Π_t ρ_t)^(1/|y|)      mask  1[c ≤ ρ ≤ C]    rejection of what lies outside

SPANS: dict[str, Callable[[Tensor, LossInputs], Tensor]] = {
    "token": lambda log_rho_T, inputs: log_rho_T.exp(),
    "sequence": lambda log_rho_T, inputs: inputs.spread_T(inputs.sum_S(log_rho_T).exp()),
    "geometric": lambda log_rho_T, inputs: inputs.spread_T(inputs.mean_S(log_rho_T).exp()),
}
FACTORS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "tis": lambda rho_T, low, high: rho_T.clamp(max=high),
    "mis": lambda rho_T, low, high: torch.where(rho_T <= high, rho_T, 0.0),
    "mask": lambda rho_T, low, high: ((rho_T >= low) & (rho_T <= high)).to(rho_T.dtype),
}
CORRECTIONS = {
    "token_tis": [("token", "tis")],
    "sequence_tis": [("sequence", "tis")],
    "token_mask": [("token", "mask")],
    "sequence_mask": [("sequence", "mask")],
    "token_mis": [("token", "mis")],
    "sequence_mis": [("sequence", "mis")],
    "geometric_mask": [("geometric", "mask")],
    "hierarchical": [("geometric", "mask"), ("token", "mask")],
}


def correction_weight(inputs: LossInputs, options: AlgorithmConfig) -> Tensor | None:
    """The product of the chosen corrections (T,), without a gradient; None if none is chosen."""
    if not options.corrections:
        return None
    current = options.correction_numerator == "current"
    numerator_T = inputs.logprobs_T if current else inputs.old_logprobs_T
    log_rho_T = (numerator_T - inputs.rollout_logprobs_T).detach()
    weight_T = torch.ones_like(log_rho_T)
    for span, factor in (part for name in options.corrections for part in CORRECTIONS[name]):
        low, high = (getattr(options, f"{span}_ratio_{end}") for end in ("min", "max"))
        weight_T = weight_T * FACTORS[factor](SPANS[span](log_rho_T, inputs), low, high)
    return weight_T


# -- advantages: plain floats per group, tensors per batch ----------------------------------------
#
# A group whose rewards are all equal gets advantages that are exactly zero (so that skipping it
# changes nothing), never rounding noise blown up by a tiny standard deviation.


def all_equal(rewards: Sequence[float]) -> bool:
    """No signal in the group: what filters such as DAPO's dynamic sampling ask."""
    return all(r == rewards[0] for r in rewards)


def group_mean(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i − mean(R): Dr.GRPO."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def group(rewards: Sequence[float]) -> list[float]:
    """A_i = (R_i − mean(R)) / (std(R) + 1e-4), the sample standard deviation: GRPO."""
    centred = group_mean(rewards)
    if all_equal(rewards):
        return centred
    std = (sum(c * c for c in centred) / (len(centred) - 1)) ** 0.5
    return [c / (std + _EPS) for c in centred]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """A_i = R_i − mean of the other rewards: RLOO. A lone sample has no baseline and gets 0."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [r - (total - r) / others for r in rewards]


@dataclass(frozen=True, slots=True)
class GroupScores:
    """What an advantage may know of the responses of one group, one entry each: their rewards, the
    number of trained tokens, and whether they were cut off at the limit."""

    rewards: Sequence[float]
    lengths: Sequence[int]
    truncated: Sequence[bool]


GroupAdvantage: TypeAlias = Callable[[GroupScores], list[float]]
PER_GROUP: dict[str, GroupAdvantage] = {
    "group": lambda scores: group(scores.rewards),
    "group_mean": lambda scores: group_mean(scores.rewards),
    "leave_one_out": lambda scores: leave_one_out(scores.rewards),
    "none": lambda scores: [0.0] * len(scores.rewards),
}


def by_turn(rewards: Sequence[Sequence[float]], gamma: float) -> list[list[float]]:
    """A_ik = G_ik − mean over the other responses j of G_jk,  G_ik = r_ik + γ·G_i(k+1).

    r_ik is what turn k of response i was given. After a response's end G is 0, which is what is
    still to come of it. The baseline of a turn is from other responses alone, so it adds no bias:
    RLOO's (`leave_one_out`), taken turn by turn. A lone response gets 0.
    """
    returns = [discounted(one, gamma) for one in rewards]
    turns_max = max(map(len, returns), default=0)
    by_number = [
        leave_one_out([one[k] if k < len(one) else 0.0 for one in returns])
        for k in range(turns_max)
    ]
    return [[by_number[k][i] for k in range(len(one))] for i, one in enumerate(returns)]


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """G_k = r_k + γ·G_(k+1).

    >>> discounted([1.0, 0.0, 2.0], 0.5)
    [1.5, 1.0, 2.0]
    """
    found: list[float] = []
    for reward in reversed(rewards):
        found.append(reward + gamma * (found[-1] if found else 0.0))
    return found[::-1]


def whiten(values_T: Tensor) -> Tensor:
    """(x − mean) / (std + 1e-8) over all tokens of the batch; zeros if there is no spread."""
    centred = values_T - values_T.mean()
    std = centred.square().mean().sqrt()
    return torch.zeros_like(values_T) if std == 0 else centred / (std + 1e-8)


def returns_to_go(rewards_T: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ·G_{t+1} along one sequence."""
    out = torch.empty_like(rewards_T)
    running = rewards_T.new_zeros(())
    for t in range(rewards_T.shape[0] - 1, -1, -1):
        running = rewards_T[t] + gamma * running
        out[t] = running
    return out


def gae(rewards_T: Tensor, values_T: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation along one sequence: (advantages, returns).

    δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  R_t = A_t + V_t;  V after the end is 0.
    """
    following = torch.cat([values_T[1:], values_T.new_zeros(1)])
    delta = rewards_T + gamma * following - values_T
    advantages = returns_to_go(delta, gamma * lam)
    return advantages, advantages + values_T


def overlong_penalty(num_tokens: int, tokens_max: int, buffer_tokens: int, penalty: float) -> float:
    """DAPO's soft punishment: 0 up to tokens_max − buffer, then linear down to −penalty.

    −penalty · clip((n − (max − buffer)) / buffer, 0, 1); without a buffer a step at tokens_max.
    """
    if not tokens_max:
        return 0.0
    if not buffer_tokens:
        return -penalty if num_tokens > tokens_max else 0.0
    over = (num_tokens - (tokens_max - buffer_tokens)) / buffer_tokens
    return -penalty * min(1.0, max(0.0, over))
