"""Paged attention in Triton: one kernel for decode, split over the context, one for prefill.

    pool    [2, block, kv head, token, head dim] of one layer, keys then values
    table   [slot, block index] -> block number
    rows    slot and position of each query row

A decode program owns one (row, kv head, split): it loads each key and value tile once for all query
heads of the kv head. Splits write unnormalised partial sums that `merge_kernel` adds up; with one
split the result is written directly. Splits serve few rows, which would leave processors idle, and
long ones, which all others would wait for. Padding rows point at a slot of length one.

Softmax runs in base 2: `scale` already contains log2(e).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dora_rl.engine.cuda.kernels.cuts import Splits
from dora_rl.engine.cuda.kernels.overlap import begin, jit, overlap, ready

DOT_ROWS_MIN = 16  # the smallest tile of a tensor-core product
DECODE_WARPS = 4
DECODE_STAGES = 3  # key and value tiles in flight per program
DIM_USUAL = 128  # of a head; wider ones have fewer tiles in flight
STAGES_BYTES = 128 * 1024


@jit
def blocks_of(num_blocks, split, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """The blocks [first, last) of a split."""
    per_split = tl.maximum(tl.cdiv(num_blocks, SPLITS), LEAST)
    first = split * per_split
    return first, tl.minimum(first + per_split, num_blocks)


@jit
def blocks_seen(
    context,
    split,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The oldest token that a row with `context` tokens sees, and the blocks of a split."""
    oldest, skipped = 0, 0
    if WINDOW > 0:
        oldest = tl.maximum(context - WINDOW, 0)
        skipped = oldest // C
    first, last = blocks_of(tl.cdiv(context, C) - skipped, split, SPLITS, LEAST)
    return oldest, first + skipped, last + skipped


@jit
def are_seen(token, oldest, context, WINDOW: tl.constexpr):
    seen = token < context
    if WINDOW > 0:
        seen = seen & (token >= oldest)
    return seen


@jit
def store_nothing(peak_ptr, sum_ptr, part, inside, OVERLAP: tl.constexpr):
    """A split without blocks; its sums are never read."""
    ready(OVERLAP)
    tl.store(peak_ptr + part, tl.full(part.shape, -float("inf"), tl.float32), mask=inside)
    tl.store(sum_ptr + part, tl.zeros(part.shape, tl.float32), mask=inside)


@jit
def decode_kernel(
    q_ptr,
    pool_ptr,
    table_ptr,
    slots_ptr,
    positions_ptr,
    out_ptr,
    acc_ptr,
    peak_ptr,
    sum_ptr,
    scale,
    plane_stride,
    table_stride,
    KV: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    WINDOW: tl.constexpr = 0,
):
    begin(OVERLAP)
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(positions_ptr + row).to(tl.int32) + 1
    oldest, first, last = blocks_seen(context, split, C, SPLITS, LEAST, WINDOW)
    g = tl.arange(0, GP)
    part = ((row * KV + head) * G + g).to(tl.int64) * SPLITS + split
    if SPLITS > 1:  # noqa: SIM102 (the outer one is decided when it is compiled)
        if first >= last:
            store_nothing(peak_ptr, sum_ptr, part, g < G, OVERLAP)
            return
    d, t = tl.arange(0, D), tl.arange(0, C)
    q_index = (row * KV + head).to(tl.int64) * G * D + g[:, None] * D + d[None, :]
    ready(OVERLAP)
    q = tl.load(q_ptr + q_index, mask=g[:, None] < G, other=0.0)
    peak = tl.full([GP], -float("inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, D], tl.float32)
    blocks = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
    block = tl.load(blocks + first, mask=first < last, other=0).to(tl.int64)
    for index in range(first, last):
        base = pool_ptr + (block * KV + head) * C * D
        # The number of the next block is fetched while this one is used; only so does the compiler
        # keep several tiles in flight.
        block = tl.load(blocks + index + 1, mask=index + 1 < last, other=0).to(tl.int64)
        # The rest of the last block is not read: it would be a tenth of all bytes.
        seen = are_seen(index * C + t, oldest, context, WINDOW)
        k = tl.load(base + t[None, :] * D + d[:, None], mask=seen[None, :], other=0.0)
        v_tile = base + plane_stride + t[:, None] * D + d[None, :]
        v = tl.load(v_tile, mask=seen[:, None], other=0.0)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        share = tl.exp2(peak - new_peak)
        weight = tl.exp2(score - new_peak[:, None])
        total = total * share + tl.sum(weight, 1)
        acc = acc * share[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        peak = new_peak
    if SPLITS == 1:
        out = acc / total[:, None]
        tl.store(out_ptr + q_index, out.to(out_ptr.dtype.element_ty), mask=g[:, None] < G)
    else:
        tl.store(peak_ptr + part, peak, mask=g < G)
        tl.store(sum_ptr + part, total, mask=g < G)
        tl.store(acc_ptr + part[:, None] * D + d[None, :], acc, mask=g[:, None] < G)


@jit
def merge_kernel(
    acc_ptr,
    peak_ptr,
    sum_ptr,
    out_ptr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    SP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per (row, query head): add up the splits."""
    begin(OVERLAP)
    ready(OVERLAP)
    head = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SP)
    d = tl.arange(0, D)
    part = head * SPLITS + s
    peak = tl.load(peak_ptr + part, mask=s < SPLITS, other=-float("inf"))
    total = tl.load(sum_ptr + part, mask=s < SPLITS, other=0.0)
    share = tl.exp2(peak - tl.max(peak, 0))
    used = (total > 0)[:, None]
    acc = tl.load(acc_ptr + part[:, None] * D + d[None, :], mask=used, other=0.0)
    out = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out_ptr + head * D + d, out.to(out_ptr.dtype.element_ty))


@jit
def prefill_kernel(
    q_ptr,
    pool_ptr,
    table_ptr,
    tiles_ptr,
    out_ptr,
    scale,
    plane_stride,
    table_stride,
    KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr = 0,
):
    """One program per (tile of query rows of one request, query head); tiles are
    (slot, first row, first position, rows)."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(tiles_ptr + tile * 4).to(tl.int64)
    first_row = tl.load(tiles_ptr + tile * 4 + 1)
    position = tl.load(tiles_ptr + tile * 4 + 2)
    count = tl.load(tiles_ptr + tile * 4 + 3)
    r = tl.arange(0, BM)
    d = tl.arange(0, D)
    t = tl.arange(0, C)
    q_index = ((first_row + r).to(tl.int64) * KV * G + head)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + q_index, mask=r[:, None] < count, other=0.0)
    peak = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    blocks = table_ptr + slot * table_stride
    num_blocks = tl.cdiv(position + count, C)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0) // C
    block = tl.load(blocks + first).to(tl.int64)
    for index in range(first, num_blocks):
        base = pool_ptr + (block * KV + head // G) * C * D
        block = tl.load(blocks + index + 1, mask=index + 1 < num_blocks, other=0).to(tl.int64)
        k = tl.load(base + t[None, :] * D + d[:, None])
        # Behind the context may stand what a row beyond the end of another request left: even NaN.
        known = index * C + t < position + count
        v = tl.load(
            base + plane_stride + t[:, None] * D + d[None, :], mask=known[:, None], other=0.0
        )
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = index * C + t[None, :] <= position + r[:, None]
        if WINDOW > 0:
            seen = seen & (index * C + t[None, :] > position + r[:, None] - WINDOW)
        score = tl.where(seen, score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        level = new_peak
        if WINDOW > 0:  # the first blocks of a tile may show its last rows nothing
            level = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        share = tl.exp2(peak - level)
        weight = tl.exp2(score - level[:, None])
        total = total * share + tl.sum(weight, 1)
        acc = acc * share[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        peak = new_peak
    out = acc / total[:, None]
    tl.store(out_ptr + q_index, out.to(out_ptr.dtype.element_ty), mask=r[:, None] < count)


def attend_decode(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    splits: Splits,
    scale: float = 0.0,
    window: int = 0,
) -> Tensor:
    """[rows, kv head, group, head dim] -> the same shape. `scale` of query times key; 0: as usual.
    `window`: tokens that a row sees, its own included; 0: all."""
    rows, num_kv, num_q, dim = q.shape
    out = torch.empty_like(q)
    acc, peak, total = sums_of(out, splits)
    launch = overlap(q.device)
    decode_kernel[(rows, num_kv, splits.number)](
        q,
        pool,
        table,
        slots,
        positions,
        out,
        acc,
        peak,
        total,
        scale_of(dim, scale),
        pool.stride(0),
        table.stride(0),
        KV=num_kv,
        G=num_q,
        GP=max(DOT_ROWS_MIN, triton.next_power_of_2(num_q)),
        D=dim,
        C=pool.shape[3],
        SPLITS=splits.number,
        LEAST=splits.blocks_min,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=DECODE_WARPS,
        num_stages=DECODE_STAGES if dim <= DIM_USUAL else _stages_of(pool),
        **(launch | {"WINDOW": window} if window else launch),
    )
    if splits.number > 1:
        merge(acc, peak, total, out)
    return out


def scale_of(dim: int, scale: float = 0.0) -> float:
    """Of a product of query and key, for a softmax in base 2."""
    return (scale or dim**-0.5) * math.log2(math.e)


def _stages_of(pool: Tensor) -> int:
    """Of tiles of wide heads, which must fit in shared memory."""
    return max(1, STAGES_BYTES // (2 * pool.shape[3] * pool.shape[4] * pool.element_size()))


def sums_of(out: Tensor, splits: Splits) -> tuple[Tensor, Tensor, Tensor]:
    """Where the splits of `out` [row, kv head, group, head dim] leave sums, peaks and totals."""
    if splits.number == 1:
        return out, out, out  # never used
    parts = (*out.shape[:3], splits.number)
    acc, peak, total = (
        torch.empty(shape, dtype=torch.float32, device=out.device)
        for shape in ((*parts, out.shape[3]), parts, parts)
    )
    return acc, peak, total


def merge(acc: Tensor, peak: Tensor, total: Tensor, out: Tensor) -> None:
    """Add up the splits, acc [row, kv head, group, split, head dim], into `out`."""
    splits, dim = acc.shape[3:]
    merge_kernel[(acc.numel() // (splits * dim),)](
        acc,
        peak,
        total,
        out,
        D=dim,
        SPLITS=splits,
        SP=triton.next_power_of_2(splits),
        num_warps=4,
        **overlap(acc.device),
    )


def attend_prefill(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scale: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Causal attention of prefill rows over everything their request has in the cache, or so much
    of it as a window shows; `scale` and `window` as of `attend_decode`."""
    _, num_kv, num_q, dim = q.shape
    out = torch.empty_like(q)
    prefill_kernel[(len(tiles), num_kv * num_q)](
        q,
        pool,
        table,
        tiles,
        out,
        scale_of(dim, scale),
        pool.stride(0),
        table.stride(0),
        KV=num_kv,
        G=num_q,
        D=dim,
        C=pool.shape[3],
        BM=tile_rows,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4 if dim <= DIM_USUAL else 8,
        num_stages=2 if dim <= DIM_USUAL else min(2, _stages_of(pool)),
        **({"WINDOW": window} if window else {}),
    )
    return out
