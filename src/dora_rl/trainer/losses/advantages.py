"""From rewards to advantages. Pure: plain floats per group, tensors per batch.

Invariant: a group whose rewards are all equal gets advantages that are exactly zero (so that
skipping it changes nothing), never rounding noise blown up by a tiny standard deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

_EPS = 1e-4  # TRL's and the papers' guard under the standard deviation


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
}


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
