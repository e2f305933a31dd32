"""Decode attention together with what comes before it: norm, rotary embedding, cache write.

A program owns one (row, kv head, split) as in `attention.decode_kernel`, its oracle. It adds up the
parts of its query heads and of its new key and value, norms and rotates them, and starts its
softmax with the new token straight from registers; the cache is read only before that token, so
the new entry can be written at any time. Split 0 owns the new token. Only tokens of the context
are read, not the rest of its last block.

The longer prologue pays while the programs fill the GPU once or twice; with more rows than
`ROWS_MAX` the separate kernels, whose programs begin to stream sooner, are used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dora_rl.engine.cuda.kernels.attention import (
    DOT_ROWS_MIN,
    blocks_of,
    merge,
    scale_of,
    store_nothing,
    sums_of,
)
from dora_rl.engine.cuda.kernels.cuts import Splits
from dora_rl.engine.cuda.kernels.overlap import begin, jit, overlap, ready
from dora_rl.engine.cuda.kernels.rows import sum_parts

ROWS_MAX = 64
WAVE = 4  # programs to a processor
WARPS = 2
STAGES = 2  # of key and value tiles: so few that all programs of 64 rows, four a processor, fit


@jit
def _rotate(x, y, cos, sin, w, w_turned, eps, NORM: tl.constexpr, kind: tl.constexpr):
    """Norm and rotate heads [head, D]; y is x turned by half a head."""
    D: tl.constexpr = x.shape[1]
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = ((x * scale).to(kind).to(tl.float32) * w).to(kind).to(tl.float32)
        y = ((y * scale).to(kind).to(tl.float32) * w_turned).to(kind).to(tl.float32)
    return (x * cos + y * sin).to(kind)


@jit
def fused_kernel(
    qkv_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    pool_ptr,
    out_ptr,
    acc_ptr,
    peak_ptr,
    sum_ptr,
    scale,
    eps,
    rows_per_slot,
    part_stride,
    plane_stride,
    table_stride,
    KV: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = 0 if SPLITS == 1 else tl.program_id(2)  # a constant saves registers: four programs fit
    kind: tl.constexpr = out_ptr.dtype.element_ty
    position = tl.load(positions_ptr + row).to(tl.int32)
    first, last = blocks_of(tl.cdiv(position, C), split, SPLITS, LEAST)
    g = tl.arange(0, GP)
    part = ((row * KV + head) * G + g) * SPLITS + split
    if SPLITS > 1:  # noqa: SIM102 (the outer one is decided when it is compiled)
        if (split > 0) & (first >= last):
            store_nothing(peak_ptr, sum_ptr, part, g < G, OVERLAP)
            return
    blocks = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
    block = tl.load(blocks + first, mask=first < last, other=0).to(tl.int64)
    own = tl.load(blocks + position // C).to(tl.int64)
    d = tl.arange(0, D)
    t = tl.arange(0, C)
    turned = (d + D // 2) % D
    one = tl.arange(0, 1)
    cos = tl.load(cos_ptr + position * D + d)[None, :]
    sin = tl.load(sin_ptr + position * D + d)[None, :]
    real = g[:, None] < G
    whole = one[:, None] < 1
    q_base = (head * G + g)[:, None] * D
    k_base = (KV * G + head + one)[:, None] * D
    if NORM:
        weights = weight_ptr + row // rows_per_slot * (KV * G + KV) * D
        wq = tl.load(weights + q_base + d[None, :], mask=real, other=0.0).to(tl.float32)
        mirror = weights + turned[None, :]
        wq_turned = tl.load(mirror + q_base, mask=real, other=0.0).to(tl.float32)
        wk = tl.load(weights + k_base + d[None, :]).to(tl.float32)
        wk_turned = tl.load(mirror + k_base).to(tl.float32)
    else:
        wq, wq_turned, wk, wk_turned = 1.0, 1.0, 1.0, 1.0
    ready(OVERLAP)
    base = qkv_ptr + row * (KV * G + 2 * KV) * D
    q = sum_parts(base + q_base + d[None, :], real, part_stride, PARTS, kind)
    q_turned = sum_parts(base + q_base + turned[None, :], real, part_stride, PARTS, kind)
    q = _rotate(q, q_turned, cos, sin, wq, wq_turned, eps, NORM, kind)
    k_new = sum_parts(base + k_base + d[None, :], whole, part_stride, PARTS, kind)
    k_turned = sum_parts(base + k_base + turned[None, :], whole, part_stride, PARTS, kind)
    k_new = _rotate(k_new, k_turned, cos, sin, wk, wk_turned, eps, NORM, kind)
    v_new = sum_parts(base + k_base + KV * D + d[None, :], whole, part_stride, PARTS, kind)
    mine = split == 0
    if mine:
        place = pool_ptr + ((own * KV + head) * C + position % C) * D + one[:, None] + d[None, :]
        tl.store(place, k_new)
        tl.store(place + plane_stride, v_new.to(kind))
    score_new = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
    peak = tl.where(mine, score_new, -float("inf"))
    total = tl.where(mine, 1.0, 0.0) + tl.zeros([GP], tl.float32)
    acc = tl.where(mine, v_new, 0.0) + tl.zeros([GP, D], tl.float32)
    for index in range(first, last):
        tile = pool_ptr + (block * KV + head) * C * D
        # The number of the next block is fetched while this one is used; only so does the compiler
        # keep several tiles in flight.
        block = tl.load(blocks + index + 1, mask=index + 1 < last, other=0).to(tl.int64)
        seen = index * C + t < position
        k_tile = tile + t[None, :] * D + d[:, None]
        v_tile = tile + plane_stride + t[:, None] * D + d[None, :]
        k = tl.load(k_tile, mask=seen[None, :], other=0.0)
        v = tl.load(v_tile, mask=seen[:, None], other=0.0)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        share = tl.exp2(peak - new_peak)
        weight = tl.exp2(score - new_peak[:, None])
        total = total * share + tl.sum(weight, 1)
        acc = acc * share[:, None] + tl.dot(weight.to(kind), v, input_precision=PRECISION)
        peak = new_peak
    if SPLITS == 1:
        q_index = (row * KV + head) * G * D + g[:, None] * D + d[None, :]
        tl.store(out_ptr + q_index, (acc / total[:, None]).to(kind), mask=real)
    else:
        tl.store(peak_ptr + part, peak, mask=g < G)
        tl.store(sum_ptr + part, total, mask=g < G)
        tl.store(acc_ptr + part[:, None] * D + d[None, :], acc, mask=real)


def attend_fused(
    parts: Tensor,
    norm: Tensor | None,
    rope: tuple[Tensor, Tensor],
    pool: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    heads: tuple[int, int],
    splits: Splits,
    eps: float,
    dtype: torch.dtype,
    scale: float = 0.0,
) -> Tensor:
    """`parts` [part, row, (q + 2 kv) heads * D] -> [row, q heads * D].

    `where` is (table, slots, positions), `heads` (kv heads, query heads per kv head), `norm` the
    query and key norms [version slot, head, D] of the rows' versions, if the model has them.
    """
    num_parts, rows, _ = parts.shape
    (num_kv, num_q), dim, (table, slots, positions) = heads, pool.shape[4], where
    out = torch.empty((rows, num_kv, num_q, dim), dtype=dtype, device=parts.device)
    acc, peak, total = sums_of(out, splits)
    launch = overlap(parts.device)
    fused_kernel[(rows, num_kv, splits.number)](
        parts,
        parts if norm is None else norm,
        *rope,
        slots,
        positions,
        table,
        pool,
        out,
        acc,
        peak,
        total,
        scale_of(dim, scale),
        eps,
        rows // (1 if norm is None else len(norm)),
        parts.stride(0),
        pool.stride(0),
        table.stride(0),
        KV=num_kv,
        G=num_q,
        GP=max(DOT_ROWS_MIN, triton.next_power_of_2(num_q)),
        D=dim,
        C=pool.shape[3],
        SPLITS=splits.number,
        LEAST=splits.blocks_min,
        PARTS=num_parts,
        NORM=norm is not None,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        num_warps=WARPS,
        num_stages=STAGES,
        **launch,
    )
    if splits.number > 1:
        merge(acc, peak, total, out)
    return out.view(rows, -1)
