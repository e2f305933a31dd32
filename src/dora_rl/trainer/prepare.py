"""From admitted groups to documents with advantages.

Works on plain values and CPU tensors. Invariant: advantages depend on rewards (and, where the
options say so, on reference log-probs or old values) only, never on the order groups came in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dora_rl.trainer.documents import Document, document_of
from dora_rl.trainer.losses.advantages import (
    GroupScores,
    gae,
    overlong_penalty,
    returns_to_go,
    whiten,
)
from dora_rl.trainer.losses.penalties import KL
from dora_rl.trainer.losses.registry import Objective
from dora_rl.trainer.options import AlgorithmOptions
from dora_rl.types import Group


def group_documents(group: Group, options: AlgorithmOptions) -> list[Document]:
    """The group's documents, their rewards shaped by the overlong penalty, no advantages yet."""
    out = []
    for sample in group.samples:
        assert sample.reward is not None
        shaped = sample.reward + overlong_penalty(
            len(sample.token_ids),
            options.overlong_tokens_max,
            options.overlong_buffer_tokens,
            options.overlong_penalty,
        )
        out.append(document_of(group, sample, shaped))
    return out


def _kl_T(document: Document, options: AlgorithmOptions) -> Tensor | None:
    """Per-token penalty to subtract from the reward, or None."""
    if options.kl_in != "reward" or options.kl_coef == 0.0:
        return None
    assert document.ref_logprobs is not None
    estimate = KL[options.kl_estimator]
    return options.kl_coef * estimate(document.rollout_logprobs, document.ref_logprobs)


def per_group_advantages(documents: Sequence[Document], objective: Objective) -> None:
    """Fill in advantages that need the group alone: one number for all tokens of a response."""
    rewards = []
    for d in documents:
        penalty = _kl_T(d, objective.options)
        rewards.append(d.reward - (0.0 if penalty is None else float(penalty.sum())))
    assert objective.group_advantage is not None
    lengths = [d.num_trained for d in documents]
    scores = GroupScores(rewards, lengths, [d.truncated for d in documents])
    advantages = objective.group_advantage(scores)
    for d, a in zip(documents, advantages, strict=True):
        d.advantages = torch.full((d.num_trained,), a, dtype=torch.float32)


def whole_batch_advantages(documents: Sequence[Document], options: AlgorithmOptions) -> None:
    """Fill in advantages that need every response of the step.

    batch: returns to go of (reward at the last token − KL), whitened over all tokens.
    gae: from the critic's old values; whitened if the options say so.
    """
    rows: list[Tensor] = []
    for d in documents:
        rewards = torch.zeros(d.num_trained)
        rewards[-1] = d.reward
        penalty = _kl_T(d, options)
        if penalty is not None:
            rewards = rewards - penalty
        if options.advantage == "batch":
            rows.append(returns_to_go(rewards, options.gamma))
            continue
        assert d.old_values is not None
        advantages, d.returns = gae(rewards, d.old_values, options.gamma, options.gae_lambda)
        rows.append(advantages)
    flat = torch.cat(rows)
    if options.advantage == "batch" or options.whiten_advantages:
        flat = whiten(flat)
    for d, a in zip(documents, flat.split([r.shape[0] for r in rows]), strict=True):
        d.advantages = a
