"""The learner's front door: what is fed is checked, counted and described before it is trained on.

Invariant: every sample is either admitted and in the means, or in a `dropped/*` counter. What is
admitted has a finite reward and finite log-probs, at least one trained token and no more tokens
than the limit.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import torch

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
