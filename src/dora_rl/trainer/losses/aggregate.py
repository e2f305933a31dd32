"""From losses per token to one number, split so that a stream of packs adds up exactly.

Pure. Every aggregation is (Σ over tokens of weight·loss) / denominator, where the weight is known
from the token's own sequence and the denominator is a count that is complete only at the end of
the update. The learner sums numerators' gradients pack by pack and divides once.

    token_mean     Σ_i Σ_t l_it / Σ_i |y_i|
    sequence_mean  (1/N) Σ_i (1/|y_i|) Σ_t l_it
    constant       (1/N) Σ_i (1/C) Σ_t l_it       C = constant_tokens

|y_i| counts the trained tokens of response i and N the responses, including those a correction
masks and those whose advantage is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dora_rl.trainer.losses.inputs import LossInputs


def numerator(loss_T: Tensor, inputs: LossInputs, aggregation: str) -> Tensor:
    """The pack's part of the sum, before division by the denominator."""
    if aggregation == "sequence_mean":
        return (loss_T / inputs.spread_T(inputs.tokens_S())).sum()
    return loss_T.sum()


def denominator(
    aggregation: str, num_tokens: int, num_sequences: int, constant_tokens: int | None
) -> float:
    """What the whole update's numerator is divided by."""
    if aggregation == "token_mean":
        return float(num_tokens)
    if aggregation == "sequence_mean":
        return float(num_sequences)
    assert aggregation == "constant" and constant_tokens
    return float(num_sequences) * constant_tokens


def whole(
    loss_T: Tensor, inputs: LossInputs, aggregation: str, constant_tokens: int | None = None
) -> Tensor:
    """The aggregated loss of one complete batch: the plain form, for tests and small uses."""
    den = denominator(aggregation, loss_T.numel(), inputs.num_sequences, constant_tokens)
    return numerator(loss_T, inputs, aggregation) / torch.tensor(den, dtype=loss_T.dtype)
