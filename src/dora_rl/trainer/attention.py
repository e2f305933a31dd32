"""Causal attention over packed documents: no token sees another document.

Never pads the pack itself. Invariant: every backend gives the same numbers as `loop`, which runs
one document at a time and is the oracle in the tests.

    varlen   torch.nn.attention.varlen (flash kernels); CUDA, half precision
    flex     flex_attention compiled with a document mask; CUDA
    blocks   batched matrix products over documents of similar length; the CPU's choice
    sdpa     one SDPA call under a dense mask; short packs and unusual devices
    loop     one SDPA call per document

Every backend takes q (P, Q, D), k and v (P, K, D) and gives (P, Q, D). A `window` is how many
tokens of its document a query sees, its own included; 0: all before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dora_rl.config.section import choose
from dora_rl.trainer.checks import check_attention

# A document joins a bucket if it is at least this long relative to the bucket's longest. The
# padding this allows costs attention only, and less than the calls it saves.
_BUCKET_FILL_MIN = 0.9
# Beyond this length the probabilities that `blocks` keeps weigh more than the flash kernel's
# overhead: such a pack runs document by document.
_BLOCKS_LENGTH_MAX = 1024
_QUERY_BLOCK = 64

_Plan = TypeVar("_Plan")


def send(data: Tensor, device: torch.device) -> Tensor:
    """To the device. A GPU copies from pinned memory, so that nobody waits for what it is doing."""
    if device.type != "cuda":
        return data.to(device)
    return data.pin_memory().to(device, non_blocking=True)


class Layout:
    """Where the documents of one pack begin and end, and what backends derive from that; made once
    for all layers."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        assert lengths and all(n > 0 for n in lengths)
        self.lengths, self.device = tuple(lengths), device
        self.length_max, self.num_tokens = max(lengths), sum(lengths)
        counts = torch.tensor(self.lengths)
        ends = counts.cumsum(0)
        starts = ends - counts
        self.starts: list[int] = starts.tolist()
        self.document_P = send(torch.repeat_interleave(counts), device)
        position_P = torch.arange(self.num_tokens) - starts.repeat_interleave(counts)
        self.position_P = send(position_P, device)
        cu_lengths = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        self.cu_lengths = send(cu_lengths.to(torch.int32), device)
        self._plans: dict[Any, Any] = {}

    def plan(self, make: Callable[..., _Plan], *how: int) -> _Plan:
        """What a backend derives from the layout, made on first use."""
        if (make, how) not in self._plans:
            self._plans[make, how] = make(self, *how)
        return self._plans[make, how]

    def buckets(self) -> list[list[int]]:
        """Documents of similar length together, longest first."""
        order = sorted(range(len(self.lengths)), key=lambda d: (-self.lengths[d], d))
        buckets: list[list[int]] = []
        for d in order:
            if buckets and self.lengths[d] >= _BUCKET_FILL_MIN * self.lengths[buckets[-1][0]]:
                buckets[-1].append(d)
            else:
                buckets.append([d])
        return buckets


class Attend(Protocol):
    """A backend."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int = 0
    ) -> Tensor: ...


def attend_loop(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int = 0
) -> Tensor:
    """One document at a time."""
    documents = zip(*(x.split(layout.lengths) for x in (q, k, v)), strict=True)
    parts = [_one_document(a, b, c, scale, window) for a, b, c in documents]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _one_document(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    if not 0 < window < len(q):
        return _sdpa(q, k, v, scale=scale, is_causal=True)
    position = torch.arange(len(q), device=q.device)
    return _sdpa(q, k, v, scale=scale, attn_mask=_sees(position, position, window))


def _sees(position_Q: Tensor, position_K: Tensor, window: int) -> Tensor:
    """(Q, K): which keys of its document a query sees."""
    distance = position_Q[:, None] - position_K[None, :]
    return (distance >= 0) & (distance < window) if window else distance >= 0


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int = 0
) -> Tensor:
    """One call under a dense block-diagonal causal mask."""
    d, p = layout.document_P, layout.position_P
    mask = (d[:, None] == d[None, :]) & _sees(p, p, window)
    return _sdpa(q, k, v, scale=scale, attn_mask=mask)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return _with_heads_first(F.scaled_dot_product_attention, q, k, v, **how)


def _with_heads_first(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **how: Any
) -> Tensor:
    """As torch wants them: (1, heads, tokens, D), and back."""
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attend(q, k, v, enable_gqa=grouped, **how)[0].transpose(0, 1)


@cache
def _varlen() -> tuple[Callable[..., Tensor], bool]:
    """torch's flash attention for packed documents, and whether it groups heads by itself:
    the oldest that we allow does not."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters  # type: ignore[return-value]


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int = 0
) -> Tensor:
    """torch's own flash attention for packed documents."""
    attend, groups_heads = _varlen()
    how: dict[str, Any] = {"scale": scale, "window_size": (window - 1, 0)}  # tokens before; -1: all
    if q.shape[1] != k.shape[1]:
        if groups_heads:
            how["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    cu, n = layout.cu_lengths, layout.length_max
    return attend(q, k, v, cu, cu, n, n, **how)


@cache
def _flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), torch.compile(create_block_mask)


def _flex_mask(layout: Layout, window: int) -> Any:
    document, n = layout.document_P, layout.num_tokens

    def causal_document(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & (q >= k)

    def windowed_document(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & (q >= k) & (q - k < window)

    sees = windowed_document if window else causal_document
    return _flex()[1](sees, None, None, n, n, device=str(layout.device))


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int = 0
) -> Tensor:
    """flex_attention under a document mask."""
    mask = layout.plan(_flex_mask, window)
    return _with_heads_first(_flex()[0], q, k, v, block_mask=mask, scale=scale)


# -- blocks ---------------------------------------------------------------------------------------
#
# torch's flash kernel for the CPU spends most of its time on overhead when documents are short;
# plain batched products of query blocks against the keys before them are two to three times faster
# there. Every head of a document becomes its own row of a batch. All buckets share one flat buffer,
# so that moving between the pack's order and the batches' order is one gather each way:
#
#     pack (P, Q, D)  --gather-->  bucket 0 (n0, Q, L0, D) | bucket 1 (n1, Q, L1, D) | ...
#
# Slots past a document's end repeat the pack's first token; causality hides them from the real
# ones, and their outputs are never gathered back.


class Gather(NamedTuple):
    """Row indices for one number of heads: `into` batches (padding repeated) and `back`."""

    into: Tensor
    back: Tensor


class Bucket(NamedTuple):
    """Documents of one batch, and where it lies in the flat buffer."""

    documents: list[int]
    length: int
    offset: int  # in slots (documents × length) before this bucket

    def rows(self, flat: Tensor, heads: int, groups: int) -> Tensor:
        """Its part of the flat buffer as (documents·groups, heads/groups, L, D)."""
        n = len(self.documents)
        rows = flat[self.offset * heads : (self.offset + n * self.length) * heads]
        return rows.view(n * groups, heads // groups, self.length, -1)


class BlockPlan:
    """Buckets and gather indices of one pack; made once, used by every layer. A model that
    transformers runs takes its batches from here, too."""

    def __init__(self, layout: Layout) -> None:
        self.buckets: list[Bucket] = []
        self._layout = layout
        offset = 0
        for documents in layout.buckets():
            length = layout.lengths[documents[0]]
            self.buckets.append(Bucket(documents, length, offset))
            offset += len(documents) * length
        self._gathers: dict[int, Gather] = {}

    def gather(self, heads: int) -> Gather:
        if heads not in self._gathers:
            self._gathers[heads] = self._make_gather(heads)
        return self._gathers[heads]

    def _make_gather(self, heads: int) -> Gather:
        lengths, starts = torch.tensor(self._layout.lengths), torch.tensor(self._layout.starts)
        into, back = [], torch.empty(self._layout.num_tokens * heads, dtype=torch.int64)
        head = torch.arange(heads)[None, :, None]
        for bucket in self.buckets:
            length, start = (x[bucket.documents][:, None, None] for x in (lengths, starts))
            column = torch.arange(bucket.length)[None, None, :]
            rows = (start + column) * (column < length) * heads + head
            slots = torch.arange(rows.numel()).view(rows.shape) + bucket.offset * heads
            real = (column < length).expand(rows.shape)
            back[rows[real]] = slots[real]
            into.append(rows.reshape(-1))
        return Gather(torch.cat(into), back)


def _query_blocks(length: int, window: int) -> list[tuple[int, int, int]]:
    """Queries [start, end) and the first key that any of them sees."""
    starts = range(0, length, _QUERY_BLOCK)
    firsts = (max(0, start - window + 1) if window else 0 for start in starts)
    return [(s, min(s + _QUERY_BLOCK, length), k) for s, k in zip(starts, firsts, strict=True)]


def _causal_mask(rows: int, keys: int, repeat: int, window: int) -> Tensor:
    """0 where a query of the block may look, −inf elsewhere; query heads stacked `repeat` times."""
    mask = torch.full((rows, keys), float("-inf")).triu_(keys - rows + 1)
    if window:
        mask += torch.full((rows, keys), float("-inf")).tril_(keys - rows - window)
    return mask.repeat(repeat, 1) if repeat > 1 else mask


class BlockedAttention(torch.autograd.Function):
    """softmax(q·kᵀ·scale + causal)·v per document; keeps the probabilities for the way back."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, window: int
    ) -> Tensor:
        heads, groups, d = q.shape[1], k.shape[1], q.shape[2]
        wide, narrow = plan.gather(heads), plan.gather(groups)
        qf = q.reshape(-1, d).index_select(0, wide.into)
        kf, vf = (x.reshape(-1, d).index_select(0, narrow.into) for x in (k, v))
        of = torch.empty_like(qf)
        shares: list[Tensor] = []
        for bucket in plan.buckets:
            qb, ob = (bucket.rows(x, heads, groups) for x in (qf, of))
            kb, vb = (bucket.rows(x, groups, groups)[:, 0] for x in (kf, vf))
            for start, end, low in _query_blocks(bucket.length, window):
                rows = qb[:, :, start:end].reshape(kb.shape[0], -1, d)
                mask = _causal_mask(end - start, end - low, heads // groups, window)
                s = torch.baddbmm(mask, rows, kb[:, low:end].transpose(1, 2), alpha=scale)
                shares.append(s.softmax(-1))
                mixed = torch.bmm(shares[-1], vb[:, low:end])
                ob[:, :, start:end] = mixed.view(kb.shape[0], -1, end - start, d)
        ctx.save_for_backward(qf, kf, vf, *shares)
        ctx.plan, ctx.scale, ctx.window, ctx.shape = plan, scale, window, (heads, groups, d)
        return of.index_select(0, wide.back).view(q.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qf, kf, vf, *shares = ctx.saved_tensors
        heads, groups, d = ctx.shape
        wide, narrow = ctx.plan.gather(heads), ctx.plan.gather(groups)
        # Padding slots get no gradient, so they add nothing to keys or values.
        gf = torch.zeros_like(qf).index_copy_(0, wide.back, grads[0].reshape(-1, d))
        gq, gk, gv = torch.empty_like(qf), torch.zeros_like(kf), torch.zeros_like(vf)
        at = iter(shares)
        for bucket in ctx.plan.buckets:
            qb, gb, gqb = (bucket.rows(x, heads, groups) for x in (qf, gf, gq))
            kb, vb, gkb, gvb = (bucket.rows(x, groups, groups)[:, 0] for x in (kf, vf, gk, gv))
            for start, end, low in _query_blocks(bucket.length, ctx.window):
                share = next(at)
                rows, g = (x[:, :, start:end].reshape(kb.shape[0], -1, d) for x in (qb, gb))
                gvb[:, low:end].baddbmm_(share.transpose(1, 2), g)
                gs = torch.ops.aten._softmax_backward_data(
                    torch.bmm(g, vb[:, low:end].transpose(1, 2)), share, -1, share.dtype
                )
                gqb[:, :, start:end] = (
                    torch.bmm(gs, kb[:, low:end])
                    .mul_(ctx.scale)
                    .view(kb.shape[0], -1, end - start, d)
                )
                gkb[:, low:end].baddbmm_(gs.transpose(1, 2), rows, alpha=ctx.scale)
        back = (
            x.index_select(0, g.back).view(-1, h, d)
            for x, g, h in ((gq, wide, heads), (gk, narrow, groups), (gv, narrow, groups))
        )
        return (*back, None, None, None)


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int = 0
) -> Tensor:
    """Batched products over documents of similar length, query block by query block."""
    plan = layout.plan(BlockPlan)
    return BlockedAttention.apply(q, k, v, plan, scale, window)  # type: ignore[return-value]


def attend_cpu(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float, window: int = 0
) -> Tensor:
    """`blocks`, unless a document is long or the numbers are not float32."""
    if layout.length_max > _BLOCKS_LENGTH_MAX or q.dtype != torch.float32:
        return attend_loop(q, k, v, layout, scale, window)
    return attend_blocks(q, k, v, layout, scale, window)


BACKENDS: dict[str, Attend] = {
    "varlen": attend_varlen,
    "flex": attend_flex,
    "blocks": attend_blocks,
    "sdpa": attend_sdpa,
    "loop": attend_loop,
}


def pick_attention(name: str, device: torch.device, dtype: torch.dtype) -> Attend:
    """The backend the user named, or the best one of this device."""
    cuda = device.type == "cuda"
    if name == "auto":
        if not cuda:
            return attend_cpu
        return attend_varlen if dtype in (torch.bfloat16, torch.float16) else attend_loop
    choose("trainer.attention", name, (*BACKENDS, "auto"))
    check_attention(name, on_gpu=cuda, dtype=str(dtype).removeprefix("torch."))
    return BACKENDS[name]
