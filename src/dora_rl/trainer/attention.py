"""Causal attention over packed documents: no token sees another document.

Never pads the pack itself. Invariant: every backend gives the same numbers as `loop`, which runs
one document at a time and is the oracle in the tests.

    varlen   torch.nn.attention.varlen (flash kernels); CUDA, half precision
    flex     flex_attention compiled with a document mask; CUDA
    buckets  documents of similar length side by side in one SDPA call; the CPU's choice
    sdpa     one SDPA call under a dense mask; short packs and unusual devices
    loop     one SDPA call per document

Shapes: T packed tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dora_rl.trainer.options import choose
from dora_rl.types import UserError

# A document joins a bucket if it is at least this long relative to the bucket's longest. The
# padding this allows costs attention only, and less than the calls it saves.
_BUCKET_FILL_MIN = 0.8


class Bucket(NamedTuple):
    """Documents run as one batch: `rows` (n·L) of the pack in, `slots` of the batch out."""

    num_documents: int
    length: int
    rows: Tensor
    slots: Tensor
    packed_rows: Tensor


class Layout:
    """Where the documents of one pack begin and end; made once, used by every layer."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        assert lengths and all(n > 0 for n in lengths)
        self.lengths = tuple(lengths)
        self.device = device
        self.length_max = max(lengths)
        self.num_tokens = sum(lengths)
        ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        starts = ends - torch.tensor(lengths, dtype=torch.int64)
        self.starts: list[int] = starts.tolist()
        self.document_T = torch.repeat_interleave(torch.tensor(lengths)).to(device)
        position = torch.arange(self.num_tokens) - starts.repeat_interleave(torch.tensor(lengths))
        self.position_T = position.to(device)
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        self.cu_lengths = cu.to(device=device, dtype=torch.int32)
        self._buckets: list[Bucket] | None = None
        self._flex_mask: Any = None

    def buckets(self) -> list[Bucket]:
        if self._buckets is None:
            self._buckets = [self._bucket(docs) for docs in bucket_documents(self.lengths)]
        return self._buckets

    def _bucket(self, documents: list[int]) -> Bucket:
        length = max(self.lengths[d] for d in documents)
        lengths = torch.tensor([self.lengths[d] for d in documents])[:, None]
        starts = torch.tensor([self.starts[d] for d in documents])[:, None]
        column = torch.arange(length)[None, :]
        # A slot past the end repeats the document's last row: finite, and causality hides it.
        rows = (starts + torch.minimum(column, lengths - 1)).reshape(-1)
        slots = (column < lengths).reshape(-1).nonzero().squeeze(-1)
        to = self.device
        return Bucket(len(documents), length, rows.to(to), slots.to(to), rows[slots].to(to))

    def flex_mask(self) -> Any:
        """The block mask of flex_attention, built once per pack."""
        if self._flex_mask is None:
            from torch.nn.attention.flex_attention import create_block_mask

            document = self.document_T

            def causal_document(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (document[q] == document[k]) & (q >= k)

            n = self.num_tokens
            build = torch.compile(create_block_mask)
            self._flex_mask = build(causal_document, None, None, n, n, device=str(self.device))
        return self._flex_mask


def bucket_documents(lengths: Sequence[int]) -> list[list[int]]:
    """Documents of similar length together, longest first."""
    order = sorted(range(len(lengths)), key=lambda d: (-lengths[d], d))
    buckets: list[list[int]] = []
    for d in order:
        if buckets and lengths[d] >= _BUCKET_FILL_MIN * lengths[buckets[-1][0]]:
            buckets[-1].append(d)
        else:
            buckets.append([d])
    return buckets


class _ToBatch(torch.autograd.Function):
    """Rows of the pack into bucket slots; the gradient of a repeated (padding) row is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bucket: Bucket) -> Tensor:
        ctx.bucket, ctx.num_rows = bucket, x.shape[0]
        return x.index_select(0, bucket.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        bucket: Bucket = ctx.bucket
        (grad,) = grads
        out = grad.new_zeros((ctx.num_rows, *grad.shape[1:]))
        out.index_copy_(0, bucket.packed_rows, grad.index_select(0, bucket.slots))
        return out, None


def _batched(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """SDPA on (n, L, heads, D) with grouped key/value heads; returns (n, L, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)


def attend_loop(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """One document at a time."""
    parts = [
        _batched(q[s : s + n][None], k[s : s + n][None], v[s : s + n][None], scale)[0]
        for s, n in zip(layout.starts, layout.lengths, strict=True)
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def attend_buckets(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Documents of similar length side by side."""
    out = []
    for b in layout.buckets():
        qb, kb, vb = (
            _ToBatch.apply(x, b).view(b.num_documents, b.length, *x.shape[1:])  # type: ignore[union-attr]
            for x in (q, k, v)
        )
        y = _batched(qb, kb, vb, scale).reshape(b.num_documents * b.length, *q.shape[1:])
        out.append((b, y))
    return _FromBatches.apply(layout, *(y for _, y in out))  # type: ignore[return-value]


class _FromBatches(torch.autograd.Function):
    """Bucket slots back into rows of the pack."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *batches: Tensor) -> Tensor:
        ctx.layout = layout
        out = batches[0].new_empty((layout.num_tokens, *batches[0].shape[1:]))
        for b, y in zip(layout.buckets(), batches, strict=True):
            out.index_copy_(0, b.packed_rows, y.index_select(0, b.slots))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        back: list[Tensor | None] = [None]
        for b in ctx.layout.buckets():
            g = grad.new_zeros((b.num_documents * b.length, *grad.shape[1:]))
            back.append(g.index_copy_(0, b.slots, grad.index_select(0, b.packed_rows)))
        return tuple(back)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """One call under a dense block-diagonal causal mask."""
    d = layout.document_T
    p = layout.position_T
    mask = (d[:, None] == d[None, :]) & (p[:, None] >= p[None, :])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return out[0].transpose(0, 1)


@cache
def _varlen() -> Callable[..., Tensor] | None:
    """torch's flash attention for packed documents, with its causal argument filled in."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    has_gqa = "enable_gqa" in known

    def call(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
        extra: dict[str, Any] = dict(causal)
        if q.shape[1] != k.shape[1]:
            if has_gqa:
                extra["enable_gqa"] = True
            else:
                repeat = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        cu, n = layout.cu_lengths, layout.length_max
        return varlen_attn(q, k, v, cu, cu, n, n, scale=scale, **extra)  # type: ignore[return-value]

    return call


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """torch's own flash attention for packed documents."""
    call = _varlen()
    assert call is not None
    return call(q, k, v, layout, scale)


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """flex_attention under a document mask."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = _flex()(q, k, v, block_mask=layout.flex_mask(), scale=scale, enable_gqa=gqa)
    return out[0].transpose(0, 1)


Attend = Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]

BACKENDS: dict[str, Attend] = {
    "varlen": attend_varlen,
    "flex": attend_flex,
    "buckets": attend_buckets,
    "sdpa": attend_sdpa,
    "loop": attend_loop,
}


def pick_attention(name: str, device: torch.device, dtype: torch.dtype) -> Attend:
    """The backend the user named, or the best one this machine has."""
    half = dtype in (torch.bfloat16, torch.float16)
    flash = device.type == "cuda" and half and _varlen() is not None
    if name == "auto":
        if flash:
            return attend_varlen
        return attend_buckets
    choose("trainer.attention", name, (*BACKENDS, "auto"))
    if name == "varlen" and not flash:
        raise UserError("trainer.attention 'varlen' needs CUDA and bfloat16; use 'auto'")
    if name == "flex" and device.type != "cuda":
        raise UserError("trainer.attention 'flex' needs CUDA; use 'auto'")
    return BACKENDS[name]
