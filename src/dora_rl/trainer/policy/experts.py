"""The mixture-of-experts feed-forward of Qwen3-MoE, with the experts' matrices stacked.

Invariant: the output of a token is the weighted sum over its top-k experts, whatever the other
tokens of the pack are. One grouped matrix product per projection on CUDA, a loop over the experts
that were hit elsewhere.

The Hugging Face checkpoint has a matrix of its own for each expert; no other name differs from the
decoder's. `to_checkpoint` and `from_checkpoint` are inverses, tensor for tensor.

    model.layers.0.mlp.experts.gate_up_proj (E, 2·I, H)
        <-> model.layers.0.mlp.experts.{e}.{gate,up}_proj.weight (I, H)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dora_rl.model.spec import MoeSpec
from dora_rl.trainer.policy.lean_ops import row_softmax

# Public since torch 2.10; the private name is older.
_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class Router(nn.Module):
    """Softmax over experts in float32, then the top k (renormalised where the model says so)."""

    def __init__(self, hidden: int, moe: MoeSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(moe.num_experts, hidden))
        self.num_chosen, self.renormalise = moe.top_k, moe.normalise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight.to(x.dtype))
        share, expert = row_softmax(logits).topk(self.num_chosen, dim=-1)
        if self.renormalise:
            share = share / share.sum(-1, keepdim=True)
        return share.to(x.dtype), expert


class Experts(nn.Module):
    """All experts of a layer: gate and up stacked as (E, 2·I, H), down as (E, H, I)."""

    def __init__(self, hidden: int, moe: MoeSpec) -> None:
        super().__init__()
        e, i = moe.num_experts, moe.intermediate
        self.gate_up_proj = nn.Parameter(torch.zeros(e, 2 * i, hidden))
        self.down_proj = nn.Parameter(torch.zeros(e, hidden, i))

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

    def __init__(self, hidden: int, moe: MoeSpec) -> None:
        super().__init__()
        self.gate = Router(hidden, moe)
        self.experts = Experts(hidden, moe)
        self.num_experts = moe.num_experts

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


_STACKED = (".experts.gate_up_proj", ".experts.down_proj")


def to_checkpoint(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors that one parameter of the decoder stands for."""
    if not name.endswith(_STACKED):
        yield name, tensor
        return
    prefix, kind = name.rsplit(".", 1)
    for expert in range(tensor.shape[0]):
        if kind == "down_proj":
            yield f"{prefix}.{expert}.down_proj.weight", tensor[expert]
            continue
        gate, up = tensor[expert].chunk(2, dim=0)
        yield f"{prefix}.{expert}.gate_proj.weight", gate
        yield f"{prefix}.{expert}.up_proj.weight", up


def from_checkpoint(name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> Tensor:
    """One parameter of the decoder, read from a checkpoint by the checkpoint's names."""
    if not name.endswith(_STACKED):
        return read(name)
    prefix, kind = name.rsplit(".", 1)
    if kind == "down_proj":
        return torch.stack([read(f"{prefix}.{e}.down_proj.weight") for e in range(shape[0])])
    return torch.stack(
        [
            torch.cat([read(f"{prefix}.{e}.{part}_proj.weight") for part in ("gate", "up")])
            for e in range(shape[0])
        ]
    )
