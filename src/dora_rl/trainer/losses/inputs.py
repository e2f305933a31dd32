"""What a loss sees, and what it gives back: flat tensors over the trained tokens of a pack.

Pure data. Invariant: a pack holds whole responses, so per-sequence sums are complete; tokens an
environment wrote are not in it, so there is no padding and no mask to forget.

Shapes: T trained tokens, S sequences. `sequence_T[t]` says which of the S a token belongs to.

    two responses of 2 and 1 tokens:  sequence_T = [0, 0, 1], num_sequences = 2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dora_rl.trainer.options import AlgorithmOptions


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Log-probs of the same tokens under several policies, and their advantages.

    `logprobs_T` is the policy being trained and the only tensor with a gradient. `old_logprobs_T`
    is the policy the ratio is taken to; `rollout_logprobs_T` what the engine reported.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    rollout_logprobs_T: Tensor
    advantages_T: Tensor
    sequence_T: Tensor
    num_sequences: int

    def sum_S(self, x_T: Tensor) -> Tensor:
        """Sum over each sequence."""
        out = torch.zeros(self.num_sequences, dtype=x_T.dtype, device=x_T.device)
        return out.index_add(0, self.sequence_T, x_T)

    def tokens_S(self) -> Tensor:
        """Trained tokens of each sequence."""
        return self.sum_S(torch.ones_like(self.advantages_T))

    def mean_S(self, x_T: Tensor) -> Tensor:
        """Mean over each sequence."""
        return self.sum_S(x_T) / self.tokens_S().clamp(min=1)

    def spread_T(self, x_S: Tensor) -> Tensor:
        """A sequence's value at each of its tokens."""
        return x_S.index_select(0, self.sequence_T)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Unreduced loss per token, and 0/1 marks of tokens whose gradient was clipped away."""

    loss_T: Tensor
    clipped_low_T: Tensor | None = None
    clipped_high_T: Tensor | None = None


LossFunction: TypeAlias = Callable[[LossInputs, AlgorithmOptions], LossOutput]
