"""The mixture-of-experts feed-forward of Qwen3-MoE, with the experts' matrices stacked.

Invariant: the output of a token is the weighted sum over its top-k experts, whatever the other
tokens of the pack are. One grouped matrix product per projection on CUDA, a loop over the experts
that were hit elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dora_rl.trainer.architecture import Architecture

# Public since torch 2.10; the private name is older.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class Router(nn.Module):
    """Softmax over experts in float32, then the top k (renormalised where the model says so)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(arch.num_experts, arch.hidden))
        self.num_chosen, self.renormalise = arch.experts_per_token, arch.norm_topk

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight.to(x.dtype))
        share, expert = logits.softmax(-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
        if self.renormalise:
            share = share / share.sum(-1, keepdim=True)
        return share.to(x.dtype), expert


class Experts(nn.Module):
    """All experts of a layer: gate and up stacked as (E, 2·I, H), down as (E, H, I)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        e, i, h = arch.num_experts, arch.expert_intermediate, arch.hidden
        self.gate_up_proj = nn.Parameter(torch.zeros(e, 2 * i, h))
        self.down_proj = nn.Parameter(torch.zeros(e, h, i))

    def forward(self, x: Tensor, count_E: Tensor) -> Tensor:
        """Rows sorted by expert, `count_E` of them for each."""
        gate_up = self.gate_up_proj.to(x.dtype)
        down = self.down_proj.to(x.dtype)
        if x.is_cuda and x.dtype == torch.bfloat16:
            ends = count_E.cumsum(0).to(torch.int32)
            hidden = _grouped_mm(x, gate_up.transpose(1, 2), offs=ends)
            gate, up = hidden.chunk(2, dim=-1)
            return _grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
        out = []
        for expert, rows in enumerate(x.split(count_E.tolist())):
            if rows.shape[0]:
                gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=-1)
                out.append(F.linear(F.silu(gate) * up, down[expert]))
        return torch.cat(out)


class SparseMlp(nn.Module):
    """Route, run the chosen experts, add up."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate = Router(arch)
        self.experts = Experts(arch)
        self.num_experts = arch.num_experts

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.gate(x)
        flat = expert.reshape(-1)
        order = flat.argsort(stable=True)
        # Not bincount: its output size is unknown to the compiler.
        count_E = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        count_E = count_E.index_add(0, flat, torch.ones_like(flat))
        token = order // expert.shape[1]
        y = self.experts(x.index_select(0, token), count_E)
        y = y * share.reshape(-1).index_select(0, order)[:, None]
        # Back beside each other and summed in a fixed order: adding rows up as they come would
        # give the same weights another result in every run on a GPU.
        place = torch.empty_like(order).index_copy(
            0, order, torch.arange(len(order), device=x.device)
        )
        return y.index_select(0, place).view(*expert.shape, -1).sum(1)
