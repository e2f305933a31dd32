"""Causal attention over packed documents: no token sees another document.

Never pads the pack itself. Invariant: every backend gives the same numbers as `loop`, which runs
one document at a time and is the oracle in the tests.

    varlen   torch.nn.attention.varlen (flash kernels); CUDA, half precision
    flex     flex_attention compiled with a document mask; CUDA
    blocks   batched matrix products over documents of similar length; the CPU's choice
    sdpa     one SDPA call under a dense mask; short packs and unusual devices
    loop     one SDPA call per document

Shapes: T packed tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dora_rl.config.section import choose
from dora_rl.trainer.attention.blocks import attend_blocks
from dora_rl.trainer.attention.layout import Layout
from dora_rl.trainer.checks import check_attention
from dora_rl.types import UserError

# Beyond this length the probabilities that `blocks` keeps weigh more than the flash kernel's
# overhead: such a pack runs document by document.
_BLOCKS_LENGTH_MAX = 1024

Attend = Callable[[Tensor, Tensor, Tensor, Layout, float], Tensor]


def attend_loop(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """One document at a time."""
    gqa = q.shape[1] != k.shape[1]
    parts = []
    for start, n in zip(layout.starts, layout.lengths, strict=True):
        at = slice(start, start + n)
        qd, kd, vd = (x[at].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            qd, kd, vd, is_causal=True, scale=scale, enable_gqa=gqa
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def attend_cpu(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """`blocks`, unless a document is long or the numbers are not float32."""
    if layout.length_max > _BLOCKS_LENGTH_MAX or q.dtype != torch.float32:
        return attend_loop(q, k, v, layout, scale)
    return attend_blocks(q, k, v, layout, scale)


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
        if "scale" in known:
            extra["scale"] = scale
        else:
            assert scale == q.shape[2] ** -0.5
        if q.shape[1] != k.shape[1]:
            if has_gqa:
                extra["enable_gqa"] = True
            else:
                repeat = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        cu, n = layout.cu_lengths, layout.length_max
        return varlen_attn(q, k, v, cu, cu, n, n, **extra)  # type: ignore[return-value]

    return call


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """torch's own flash attention for packed documents."""
    call = _varlen()
    assert call is not None
    return call(q, k, v, layout, scale)


@cache
def _flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), torch.compile(create_block_mask)


def _flex_mask(layout: Layout) -> Any:
    document, n = layout.document_T, layout.num_tokens

    def causal_document(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & (q >= k)

    return _flex()[1](causal_document, None, None, n, n, device=str(layout.device))


def attend_flex(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """flex_attention under a document mask."""
    mask = layout.plan(_flex_mask)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = _flex()[0](q, k, v, block_mask=mask, scale=scale, enable_gqa=gqa)
    return out[0].transpose(0, 1)


BACKENDS: dict[str, Attend] = {
    "varlen": attend_varlen,
    "flex": attend_flex,
    "blocks": attend_blocks,
    "sdpa": attend_sdpa,
    "loop": attend_loop,
}


def pick_attention(name: str, device: torch.device, dtype: torch.dtype) -> Attend:
    """The backend the user named, or the best one this machine has."""
    cuda = device.type == "cuda"
    flash = cuda and dtype in (torch.bfloat16, torch.float16) and _varlen() is not None
    if name == "auto":
        if flash:
            return attend_varlen
        return attend_loop if cuda else attend_cpu
    choose("trainer.attention", name, (*BACKENDS, "auto"))
    check_attention(name, on_gpu=cuda, dtype=str(dtype).removeprefix("torch."))
    if name == "varlen" and not flash:
        raise UserError("trainer.attention 'varlen': this torch has no such kernel; use 'auto'")
    return BACKENDS[name]
