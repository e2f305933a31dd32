"""What a loss sees, and what it gives back: flat tensors over the trained tokens of a pack.

Pure data. Invariant: a pack holds whole responses, so per-sequence sums are complete; tokens an
environment wrote are not in it, so there is no padding and no mask to forget.

`sequence_T[t]` says which of the S sequences a token belongs to.

    two responses of 2 and 1 tokens:  sequence_T = [0, 0, 1], num_sequences = 2

A log-ratio is clamped to ±LOG_RATIO_MAX before its exponential: no token, however unlikely it was
under one of the policies, makes a loss or a gradient overflow and costs the others their update.
Within the bounds nothing changes; outside, the token's ratio is constant and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dora_rl.config import AlgorithmConfig

LOG_RATIO_MAX = 20.0  # exp(20) is 4.9e8: its square, and sums of many, are finite in float32


def ratio_of(logprobs: Tensor, base: Tensor) -> Tensor:
    """exp(log π − log π_base), the log-ratio clamped to ±LOG_RATIO_MAX."""
    return (logprobs - base).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Log-probs of the same tokens under several policies, their advantages, and where they are
    from.

    `logprobs_T` is the policy being trained; it and `entropy_T` (of the distribution that a token
    was drawn from) are the only tensors with a gradient. `old_logprobs_T` is the policy the ratio
    is taken to; `rollout_logprobs_T` what the engine reported; `ref_logprobs_T` the reference, None
    where the learner holds none (`algorithm.kl_coef` and `algorithm.reference` ask for one).
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    rollout_logprobs_T: Tensor
    advantages_T: Tensor
    sequence_T: Tensor
    num_sequences: int
    token_ids_T: Tensor  # what was sampled
    entropy_T: Tensor
    version_T: Tensor  # the policy version that sampled each token
    group_S: Tensor  # the group (prompt) of each sequence
    step: int  # the step being trained: its own version
    ref_logprobs_T: Tensor | None = None
    teacher_logprobs_T: Tensor | None = None  # None where there is no teacher
    # Trained tokens of the whole response that a sequence is of, where some response has several
    # sequences: an episode whose history branched.
    episode_tokens_S: Tensor | None = None

    @property
    def staleness_T(self) -> Tensor:
        """How many versions older than the step the policy was that sampled each token."""
        return self.step - self.version_T

    def sum_S(self, x_T: Tensor) -> Tensor:
        """Sum over each sequence."""
        out = torch.zeros(self.num_sequences, dtype=x_T.dtype, device=x_T.device)
        return out.index_add(0, self.sequence_T, x_T)

    def tokens_S(self) -> Tensor:
        """Trained tokens of each sequence."""
        return self.sum_S(torch.ones_like(self.advantages_T))

    def response_tokens_S(self) -> Tensor:
        """Trained tokens of the response that each sequence is of."""
        return self.tokens_S() if self.episode_tokens_S is None else self.episode_tokens_S

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


LossFunction: TypeAlias = Callable[[LossInputs, AlgorithmConfig], LossOutput]
