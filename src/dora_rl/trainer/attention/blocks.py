"""Packed causal attention for float32 on a CPU: batched products over documents of similar length.

torch's flash kernel for the CPU spends most of its time on overhead when documents are short; plain
batched products of query blocks against the keys before them are two to three times faster there.
Invariant: the same numbers as `attention.attend_loop`, values and gradients.

Every head of a document becomes its own row of a batch. All buckets share one flat buffer, so that
moving between the pack's order and the batches' order is one gather each way:

    pack (T, heads, D)  --gather-->  bucket 0 (n0, heads, L0, D) | bucket 1 (n1, heads, L1, D) | ...

Slots past a document's end repeat its last token; causality hides them from the real ones, and
their outputs are never gathered back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dora_rl.trainer.attention.layout import Layout

_QUERY_BLOCK = 64


class Gather(NamedTuple):
    """Row indices for one number of heads: `into` batches (padding repeated) and `back`."""

    into: Tensor
    back: Tensor


class Batch(NamedTuple):
    """Where a bucket lies in the flat buffer, in rows of one head's vectors per head."""

    num_documents: int
    length: int
    offset: int  # in slots (documents × length) before this bucket


class BlockPlan:
    """Buckets and gather indices of one pack; made once, used by every layer."""

    def __init__(self, layout: Layout) -> None:
        self.batches: list[Batch] = []
        self.lengths, self.starts = layout.lengths, layout.starts
        self.members = layout.bucket_members()
        offset = 0
        for documents in self.members:
            length = self.lengths[documents[0]]
            self.batches.append(Batch(len(documents), length, offset))
            offset += len(documents) * length
        self.num_slots = offset
        self._gathers: dict[int, Gather] = {}

    def gather(self, heads: int) -> Gather:
        if heads not in self._gathers:
            self._gathers[heads] = self._make_gather(heads)
        return self._gathers[heads]

    def _make_gather(self, heads: int) -> Gather:
        num_rows = sum(self.lengths) * heads
        into, back = [], torch.empty(num_rows, dtype=torch.int64)
        head = torch.arange(heads)[None, :, None]
        for batch, documents in zip(self.batches, self.members, strict=True):
            length = torch.tensor([self.lengths[d] for d in documents])[:, None, None]
            start = torch.tensor([self.starts[d] for d in documents])[:, None, None]
            column = torch.arange(batch.length)[None, None, :]
            rows = (start + torch.minimum(column, length - 1)) * heads + head
            slots = torch.arange(rows.numel()).view(rows.shape) + batch.offset * heads
            real = (column < length).expand(rows.shape)
            back[rows[real]] = slots[real]
            into.append(rows.reshape(-1))
        return Gather(torch.cat(into), back)


def _mask(rows: int, keys: int, repeat: int) -> Tensor:
    """0 where a query of the block may look, −inf after it; query heads stacked `repeat` times."""
    mask = torch.full((rows, keys), float("-inf")).triu_(keys - rows + 1)
    return mask.repeat(repeat, 1) if repeat > 1 else mask


class BlockedAttention(torch.autograd.Function):
    """softmax(q·kᵀ·scale + causal)·v per document; keeps the probabilities for the way back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float) -> Tensor:
        heads, groups, d = q.shape[1], k.shape[1], q.shape[2]
        wide, narrow = plan.gather(heads), plan.gather(groups)
        qf = q.reshape(-1, d).index_select(0, wide.into)
        kf = k.reshape(-1, d).index_select(0, narrow.into)
        vf = v.reshape(-1, d).index_select(0, narrow.into)
        of = torch.empty_like(qf)
        shares: list[Tensor] = []
        for batch in plan.batches:
            qb, ob = (_view(x, batch, heads, groups, d) for x in (qf, of))
            kb, vb = (_view(x, batch, groups, groups, d)[:, 0] for x in (kf, vf))
            for start in range(0, batch.length, _QUERY_BLOCK):
                end = min(start + _QUERY_BLOCK, batch.length)
                rows = qb[:, :, start:end].reshape(kb.shape[0], -1, d)
                mask = _mask(end - start, end, heads // groups)
                s = torch.baddbmm(mask, rows, kb[:, :end].transpose(1, 2), alpha=scale)
                share = s.softmax(-1)
                shares.append(share)
                ob[:, :, start:end] = torch.bmm(share, vb[:, :end]).view(
                    kb.shape[0], -1, end - start, d
                )
        ctx.save_for_backward(qf, kf, vf, *shares)
        ctx.plan, ctx.scale, ctx.shape = plan, scale, (heads, groups, d)
        return of.index_select(0, wide.back).view(q.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qf, kf, vf, *shares = ctx.saved_tensors
        heads, groups, d = ctx.shape
        plan: BlockPlan = ctx.plan
        wide, narrow = plan.gather(heads), plan.gather(groups)
        gf = _gather_zero_padding(grads[0].reshape(-1, d), wide, qf)
        gq, gk, gv = torch.empty_like(qf), torch.zeros_like(kf), torch.zeros_like(vf)
        at = iter(shares)
        for batch in plan.batches:
            qb, gb, gqb = (_view(x, batch, heads, groups, d) for x in (qf, gf, gq))
            kb, vb, gkb, gvb = (_view(x, batch, groups, groups, d)[:, 0] for x in (kf, vf, gk, gv))
            for start in range(0, batch.length, _QUERY_BLOCK):
                end = min(start + _QUERY_BLOCK, batch.length)
                share = next(at)
                rows = qb[:, :, start:end].reshape(kb.shape[0], -1, d)
                g = gb[:, :, start:end].reshape(kb.shape[0], -1, d)
                gvb[:, :end].baddbmm_(share.transpose(1, 2), g)
                gs = torch.ops.aten._softmax_backward_data(
                    torch.bmm(g, vb[:, :end].transpose(1, 2)), share, -1, share.dtype
                )
                gqb[:, :, start:end] = (
                    torch.bmm(gs, kb[:, :end]).mul_(ctx.scale).view(kb.shape[0], -1, end - start, d)
                )
                gkb[:, :end].baddbmm_(gs.transpose(1, 2), rows, alpha=ctx.scale)
        back = (
            x.index_select(0, g.back).view(-1, h, d)
            for x, g, h in ((gq, wide, heads), (gk, narrow, groups), (gv, narrow, groups))
        )
        return (*back, None, None)


def _view(flat: Tensor, batch: Batch, heads: int, groups: int, d: int) -> Tensor:
    """One bucket of the flat buffer as (documents·groups, heads/groups, L, D)."""
    n, length = batch.num_documents, batch.length
    rows = flat[batch.offset * heads : (batch.offset + n * length) * heads]
    return rows.view(n * groups, heads // groups, length, d)


def _gather_zero_padding(grad: Tensor, gather: Gather, like: Tensor) -> Tensor:
    """Gradients into the batches; padding slots get none, so they add nothing to keys or values."""
    out = torch.zeros_like(like)
    return out.index_copy_(0, gather.back, grad)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Batched products over documents of similar length, query block by query block."""
    return BlockedAttention.apply(q, k, v, layout.plan(BlockPlan), scale)  # type: ignore[return-value]
