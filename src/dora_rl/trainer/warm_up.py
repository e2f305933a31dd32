"""Compiles what a step will run, before there is anything to train.

A run's first groups take a while to generate, and the learner would do nothing meanwhile. Passes
over made-up packs of several sizes, because what torch compiles for a large one it compiles again
for a small one. Their gradients are zero and then dropped: nothing is changed. What only some runs
need (old log-probs under sealed versions) is compiled when it is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dora_rl.trainer.attention import Layout
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.memory import noting_shortage

DOCUMENT_TOKENS = 512
PACK_MIN = 8


def pack_sizes(tokens_max: int) -> list[int]:
    """Nothing larger; even and odd, and no size that a pack may have is far from one of them."""
    sizes, size = {tokens_max}, tokens_max - 1
    while size >= PACK_MIN:
        sizes.add(size)
        size = (size // 2) | 1
        if size in sizes:
            break
    return sorted((size for size in sizes if size > 1), reverse=True)


def layout_of(size: int, longest: int, device: torch.device) -> Layout:
    """So many tokens as documents that a model can read."""
    num_whole, rest = divmod(size, longest)
    return Layout([longest] * num_whole + [rest] * (rest > 0), device)


def warm_up(learner: Learner, step_tokens_max: int) -> None:
    """For steps of at most so many tokens. Does nothing where nothing is compiled."""
    on_gpu = learner.device.type == "cuda"
    if not on_gpu and not getattr(learner.policy, "compiled", False):
        return
    longest = min(DOCUMENT_TOKENS, learner.policy.positions_max)
    for size in pack_sizes(min(learner.pack_tokens, step_tokens_max)):
        if size > learner.pack_tokens:
            continue
        layout = layout_of(size, longest, learner.device)
        with noting_shortage() as missing:
            _pass(learner, layout)
        if missing:  # nor would it fit in a step: packs are smaller from now on
            learner.make_room(layout.lengths, missing[0])
    for optimizer in learner.optimizers:
        optimizer.zero_grad()
    if on_gpu:
        torch.cuda.empty_cache()  # others on this device may need what steps will not


def _pass(learner: Learner, layout: Layout) -> None:
    """As a step runs a pack: reference, teacher, policy, critic."""
    options = learner.objective.options
    ids = torch.zeros(layout.num_tokens, dtype=torch.int64, device=learner.device)
    rows = torch.arange(layout.num_tokens - 1, device=learner.device)
    with torch.no_grad():
        if learner.reference is not None:
            learner.reference(ids, layout, rows, ids[1:], options.temperature)
        if learner.teacher is not None:
            learner.teacher.policy(ids, layout, rows, ids[1:], options.temperature)
        if learner.critic is not None:
            learner.critic(ids, layout, rows)
    scores = learner.policy(ids, layout, rows, ids[1:], options.temperature)
    _backward(*scores[: 2 if options.entropy_coef else 1])
    if learner.critic is not None:
        _backward(learner.critic(ids, layout, rows))


def _backward(*values: Tensor) -> None:
    """Gradients of zero for each, laid out as those of a loss."""
    torch.stack([(value * torch.zeros_like(value)).sum() for value in values]).sum().backward()
