"""Compiles what a step will run, before there is anything to train: no step waits for it.

A run's first groups take a while to generate, and the learner would do nothing meanwhile. Passes
over made-up packs of several sizes, whose gradients are zero and then dropped: nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dora_rl.trainer.attention_layout import Layout
from dora_rl.trainer.learner import Learner

DOCUMENT_TOKENS = 512


def pack_sizes(pack_tokens: int) -> list[int]:
    """Full, odd and small ones: what is compiled for one size may not fit another."""
    sizes = {pack_tokens, pack_tokens - 1, pack_tokens // 3 | 1, 64, 9}
    return sorted((size for size in sizes if size > 1), reverse=True)


def layouts(learner: Learner) -> Iterator[Layout]:
    longest = min(DOCUMENT_TOKENS, learner.policy.positions_max)
    for size in pack_sizes(learner.pack_tokens):
        lengths = [longest] * (size // longest)
        rest = size - sum(lengths)
        yield Layout([*lengths, rest] if rest else lengths, learner.device)


def warm_up(learner: Learner) -> None:
    """Does nothing where nothing is compiled."""
    if learner.device.type != "cuda" and not getattr(learner.policy, "compiled", False):
        return
    options = learner.objective.options
    for layout in layouts(learner):
        ids = torch.zeros(layout.num_tokens, dtype=torch.int64, device=learner.device)
        rows, target = ids.new_tensor(range(layout.num_tokens - 1)), ids[1:]
        scores = learner.policy(ids, layout, rows, target, options.temperature)
        loss = scores.logprobs_N * torch.zeros_like(scores.logprobs_N)
        if options.entropy_coef:
            loss = loss + scores.entropy_N * torch.zeros_like(loss)
        loss.sum().backward()
        if learner.critic is not None:
            values = learner.critic(ids, layout, rows)
            (values * torch.zeros_like(values)).sum().backward()
    for optimizer in (learner.optimizer, learner.critic_optimizer):
        if optimizer is not None:
            optimizer.zero_grad()
