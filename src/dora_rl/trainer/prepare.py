"""From groups as they are fed to documents with advantages: checked, counted, described, compared.

Works on plain values and CPU tensors. Invariants: every sample is either admitted and in the means,
or in a `dropped/*` counter; what is admitted has a finite reward and finite log-probs, at least one
trained token and no more tokens than the limit. Advantages depend on rewards (and, where the
options say so, on reference log-probs or old values) only, never on the order groups came in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dora_rl.config import AlgorithmConfig
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
from dora_rl.trainer.meters import Meters
from dora_rl.types import REWARD_MAX, Group, StepIndex, Trajectory


def take_in(
    group: Group, step: StepIndex, tokens_max: int, vocab: int, meters: Meters
) -> Group | None:
    """The group without its bad samples, or None if none is left; metrics either way."""
    kept, faults = admit(group, tokens_max, vocab)
    for reason, count in faults.items():
        meters.count(f"dropped/{reason}", count)
    if kept is None:
        return None
    assert group.version <= step, "a trajectory from the future"
    meters.observe("staleness", step - group.version)
    for sample in kept.samples:
        assert sample.reward is not None
        meters.observe("reward", sample.reward)
        meters.observe("response_length", len(sample.token_ids))
        meters.add_sum("mixed_version_frac", torch.tensor(float(sample.mixed)), 1)
        meters.add_sum("truncated_frac", torch.tensor(float(sample.truncated)), 1)
    return kept


def admit(group: Group, tokens_max: int, vocab: int) -> tuple[Group | None, Counter[str]]:
    """The group with its trainable samples only (None if there are none), and faults by reason."""
    faults: Counter[str] = Counter()
    kept: list[Trajectory] = []
    for sample in group.samples:
        fault = sample_fault(group, sample, tokens_max, vocab)
        if fault:
            faults[fault] += 1
        else:
            kept.append(sample)
    if not kept:
        faults["empty_group"] += 1
        return None, faults
    return replace(group, samples=tuple(kept)), faults


def sample_fault(group: Group, sample: Trajectory, tokens_max: int, vocab: int) -> str:
    """Why the sample cannot be trained on, or '' if it can."""
    ids, mask = sample.token_ids, sample.loss_mask
    assert len(ids) == len(sample.logprobs) == len(mask)
    if sample.reward is None:
        return "no_reward"
    if not math.isfinite(sample.reward):
        return "non_finite_reward"
    if abs(sample.reward) > REWARD_MAX:
        return "reward_out_of_range"
    if not len(group.prompt_ids) or not mask.any():
        return "nothing_to_train"
    if len(group.prompt_ids) + len(ids) > tokens_max:
        return "too_long"
    if any(part.min() < 0 or part.max() >= vocab for part in (group.prompt_ids, ids)):
        return "token_out_of_range"
    # Tokens that are not trained on may have any log-prob.
    if not np.isfinite(sample.logprobs[mask != 0]).all():
        return "non_finite_logprob"
    return ""


def group_documents(group: Group, options: AlgorithmConfig) -> list[Document]:
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


def _kl_T(document: Document, options: AlgorithmConfig) -> Tensor | None:
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


def whole_batch_advantages(documents: Sequence[Document], options: AlgorithmConfig) -> None:
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
