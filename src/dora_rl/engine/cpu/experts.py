"""Sparse MLP on the CPU: each row visits its top experts, expert by expert, in whole tiles.

Rows are gathered per expert and padded to tiles, so a row's product does not depend on how many
others chose the same expert; a row's experts are added in the order of their rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dora_rl.engine.cpu.linear import RowLinear
from dora_rl.engine.tensors.weights import Layer
from dora_rl.model.spec import MoeSpec


def route(logits: Tensor, moe: MoeSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights and expert numbers, [row, top_k] each."""
    share, expert = torch.softmax(logits.float(), -1).topk(moe.top_k, -1)
    if moe.normalise:
        share = share / share.sum(-1, keepdim=True)
    return share.to(dtype), expert


def sparse_mlp(h: Tensor, layer: Layer, slot: int, moe: MoeSpec, linear: RowLinear) -> Tensor:
    assert layer.router is not None
    rows, width = h.shape
    share, expert = route(linear(h, layer.router[slot]), moe, h.dtype)
    flat = expert.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=moe.num_experts).tolist()
    visits = h.new_empty((rows * moe.top_k, width))
    start = 0
    for index, count in enumerate(counts):
        if not count:
            continue
        mine = order[start : start + count]
        x = h[mine // moe.top_k]
        x = functional.pad(x, (0, 0, 0, -count % linear.tile_rows))
        gate, up = linear(x, layer.gate_up[slot, index]).chunk(2, -1)
        visits[mine] = linear(functional.silu(gate) * up, layer.down[slot, index])[:count]
        start += count
    visits = visits.view(rows, moe.top_k, width) * share[..., None]
    out = visits[:, 0]
    for rank in range(1, moe.top_k):
        out = out + visits[:, rank]
    return out
