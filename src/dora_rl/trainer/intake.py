"""The learner's front door: what is fed is checked, counted and described before it is trained on.

Invariant: every sample is either admitted and in the means, or in a `dropped/*` counter.
"""

from __future__ import annotations

import torch

from dora_rl.trainer.batch import GroupBatch, admit
from dora_rl.trainer.meters import Meters
from dora_rl.types import StepIndex


def take_in(
    group: GroupBatch, step: StepIndex, tokens_max: int, vocab: int, meters: Meters
) -> GroupBatch | None:
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
        mixed = len({s.version for s in sample.segments}) > 1
        meters.add_sum("mixed_version_frac", torch.tensor(float(mixed)), 1)
        meters.add_sum("truncated_frac", torch.tensor(float(sample.truncated)), 1)
    return kept
