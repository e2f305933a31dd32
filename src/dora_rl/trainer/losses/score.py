"""The score-function family: the gradient is a weight times ∇ log π_θ, so no token's gradient is
ever clipped away. Pure."""

from __future__ import annotations

from dora_rl.config import AlgorithmConfig
from dora_rl.trainer.losses.inputs import LossInputs, LossOutput, ratio_of


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
    assert options.clip_low is not None and options.clip_high is not None, "recipe not resolved"
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    ratio = ratio_of(inputs.logprobs_T, inputs.old_logprobs_T).detach()
    loss = -ratio.clamp(low, high) * inputs.advantages_T * inputs.logprobs_T
    return LossOutput(loss, ratio < low, ratio > high)
