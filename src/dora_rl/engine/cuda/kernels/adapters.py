"""The low-rank part of LoRA products on a GPU: every row under its own version's adapter.

    y     [part, row, N + P]   sums over `part` are x weight^T: base columns, then all slots' x A^T
    up    [slot, N, R]         B of every slot, scaled
    out   [row, N]             base + (x A^T of the row's slot) B^T of that slot

A program owns a tile of rows and of columns. It runs over the slots; rows of other slots enter as
zeros, which costs little because R is small and keeps shapes static: a captured graph serves any
mix of versions. Invariant: a row reads the columns of its own slot alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dora_rl.engine.cuda.kernels.overlap import begin, jit, overlap, ready

TILE_ROWS_MAX = 64
TILE_COLUMNS = 128
DOT_MIN = 16  # the smallest side of a tensor-core product


@jit
def adapt_kernel(
    y_ptr,
    up_ptr,
    slots_ptr,
    out_ptr,
    rows,
    N,
    y_stride,
    part_stride,
    SLOTS: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, RP)
    real = m < rows
    inside = n < N
    ready(OVERLAP)
    slot_of = tl.load(slots_ptr + m, mask=real, other=-1)
    kind: tl.constexpr = up_ptr.dtype.element_ty
    row = y_ptr + m.to(tl.int64)[:, None] * y_stride
    whole = real[:, None] & inside[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for part in tl.static_range(PARTS):
        base_place = row + part * part_stride + n[None, :]
        acc += tl.load(base_place, mask=whole, other=0.0).to(tl.float32)
    for slot in range(SLOTS):
        mine = (slot_of == slot)[:, None] & (r < R)[None, :]
        down = tl.zeros([BM, RP], tl.float32)
        for part in tl.static_range(PARTS):
            down_place = row + part * part_stride + N + slot * R + r[None, :]
            down += tl.load(down_place, mask=mine, other=0.0).to(tl.float32)
        places = up_ptr + (slot * N + n[None, :]).to(tl.int64) * R + r[:, None]
        up = tl.load(places, mask=inside[None, :] & (r < R)[:, None], other=0.0)
        acc = tl.dot(down.to(kind), up, acc, input_precision=PRECISION)
    place = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=whole)


def adapt(y: Tensor, up: Tensor, slots: Tensor) -> Tensor:
    """`y` [part, row, N + P] and the adapter slot of each row -> [row, N]."""
    num_parts, rows, _ = y.shape
    num_slots, width, rank = up.shape
    out = torch.empty((rows, width), dtype=up.dtype, device=y.device)
    tile = max(DOT_MIN, min(TILE_ROWS_MAX, triton.next_power_of_2(rows)))
    adapt_kernel[(triton.cdiv(rows, tile), triton.cdiv(width, TILE_COLUMNS))](
        y,
        up,
        slots,
        out,
        rows,
        width,
        y.stride(1),
        y.stride(0),
        SLOTS=num_slots,
        R=rank,
        RP=max(DOT_MIN, triton.next_power_of_2(rank)),
        BM=tile,
        BN=TILE_COLUMNS,
        PARTS=num_parts,
        PRECISION="ieee" if up.dtype == torch.float32 else "tf32",
        num_warps=4,
        **overlap(y.device),
    )
    return out
