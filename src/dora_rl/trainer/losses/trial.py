"""A made-up batch, and a loss and an advantage tried on it before a run starts.

Pure: no model, no device. Invariant: what passes here returns finite numbers of the right shape
with a finite gradient, for packs of one and of several responses, fresh and stale, and for groups
of any size down to one response; and some token has a gradient that is not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dora_rl.trainer.losses.functions import GroupScores
from dora_rl.trainer.losses.inputs import LossInputs
from dora_rl.trainer.losses.registry import Objective
from dora_rl.user_code import UserCodeError, one_line, place_in, place_of

_LENGTHS = (5, 1, 3, 7)  # of the responses of two groups
_VOCAB = 50


def made_up_inputs(
    lengths: tuple[int, ...] = _LENGTHS, *, staleness: int = 1, reference: bool = False
) -> LossInputs:
    """Random log-probs with advantages of both signs, of policies that differ a little where the
    data is stale and not at all where `staleness` is 0. `logprobs_T` and `entropy_T` have
    gradients, as they have in training."""
    draw = torch.Generator().manual_seed(0)
    count = sum(lengths)

    def noise() -> Tensor:
        return 0.05 * staleness * torch.randn(count, generator=draw)

    logprobs = -torch.rand(count, generator=draw) * 3 - 0.01
    sequence = torch.repeat_interleave(torch.tensor(lengths))
    advantages = torch.tensor([(-1.0) ** i * (1.0 + i / 4) for i in range(len(lengths))])
    return LossInputs(
        logprobs_T=logprobs.clone().requires_grad_(),
        old_logprobs_T=logprobs + noise(),
        rollout_logprobs_T=logprobs + noise(),
        advantages_T=advantages[sequence],
        sequence_T=sequence,
        num_sequences=len(lengths),
        token_ids_T=torch.randint(_VOCAB, (count,), generator=draw),
        entropy_T=(torch.rand(count, generator=draw) + 0.1).requires_grad_(),
        version_T=torch.full((count,), 3 - staleness),
        group_S=torch.arange(len(lengths)) // 2,
        step=3,
        ref_logprobs_T=logprobs + 0.1 * torch.randn(count, generator=draw) if reference else None,
    )


def try_loss(objective: Objective) -> None:
    """Forward and backward; a mistake of the loss is one line."""
    reference = objective.needs_reference
    moves = [
        _try_on(objective, made_up_inputs(lengths, staleness=staleness, reference=reference))
        for lengths in (_LENGTHS, (1,))
        for staleness in (0, 1)
    ]
    # One batch may have none: a distance from the old policy, say, where the data is fresh.
    if not any(moves):
        raise UserCodeError(
            f"algorithm.loss '{objective.options.loss}'{place_of(objective.function)} has a "
            "gradient of zero for every token of made-up batches"
        )


def _try_on(objective: Objective, inputs: LossInputs) -> bool:
    """Whether it has a gradient."""
    name = f"algorithm.loss '{objective.options.loss}'"
    loss_T = objective.function(inputs, objective.options).loss_T
    place = place_of(objective.function)
    _check_finite(loss_T, f"{name}{place} returns a loss that is not finite", inputs)
    try:
        objective.numerator(loss_T, inputs).backward()
    except Exception as error:
        # A backward function of the user's own may raise anything.
        raise UserCodeError(
            f"{name} raised {one_line(error)} in its backward pass"
            f"{place_in(objective.function, error)}"
        ) from error
    grads = [x.grad for x in (inputs.logprobs_T, inputs.entropy_T) if x.grad is not None]
    for grad in grads:
        _check_finite(grad, f"{name}{place} has a gradient that is not finite", inputs)
    return any(bool(grad.any()) for grad in grads)


def _check_finite(values_T: Tensor, what: str, inputs: LossInputs) -> None:
    values_T = values_T.detach()
    if len(bad := (~torch.isfinite(values_T)).nonzero()):
        at = int(bad[0])
        stale = "stale" if bool(inputs.staleness_T.any()) else "on-policy"
        raise UserCodeError(
            f"{what} ({float(values_T[at])} at token {at}) on a made-up {stale} batch of "
            f"{inputs.num_sequences} responses"
        )


def try_advantage(objective: Objective, group_size: int) -> None:
    """On groups with and without a difference, and on what is left where the others failed."""
    assert objective.group_advantage is not None
    for size in sorted({group_size, 2, 1}):
        lengths = [3 + 2 * i for i in range(size)]
        truncated = [i == size - 1 for i in range(size)]
        for rewards in ([float(i % 2) for i in range(size)], [1.0] * size):
            objective.group_advantage(GroupScores(rewards, lengths, truncated))
