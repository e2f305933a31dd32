"""GSPO: the ratio of whole sequences, length-normalised, instead of tokens. Pure."""

from __future__ import annotations

from dora_rl.config import AlgorithmConfig
from dora_rl.trainer.losses.clipped import surrogate
from dora_rl.trainer.losses.inputs import LOG_RATIO_MAX, LossInputs, LossOutput


def gspo(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
    """loss_t = −min(s_i·A_t, clip(s_i, 1−ε_low, 1+ε_high)·A_t)  for every token t of sequence i,

    s_i = (π_θ(y_i)/π_old(y_i))^(1/|y_i|) = exp(mean_t(log π_θ(t) − log π_old(t))).
    With one advantage per sequence and sequence-mean aggregation this is the paper's objective.
    """
    log_ratio_S = inputs.mean_S(inputs.logprobs_T - inputs.old_logprobs_T)
    ratio_T = inputs.spread_T(log_ratio_S.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp())
    return LossOutput(*surrogate(ratio_T, inputs.advantages_T, options))
