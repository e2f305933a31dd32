"""The product of `skinny.py` written in Gluon: weights are on their way before the rows are known.

    program   init -> load weights -> wait for the kernel before -> load rows -> multiply, refill

Only the rows of x come from the kernel before; the weights do not. With programmatic dependent
launch a program starts while that kernel still drains, so it asks for as many weight tiles as its
shared memory holds, then waits, then asks for x. Plain Triton cannot say this: its loads of both
stand inside one loop. Weights and rows have rings of their own, because rows come from the L2 cache
and weights from memory. A tile makes room when the product after it has been started, so that the
tensor cores never wait for a refill.

Gluon is experimental: what is called here is Triton 3.6's, and with any other Triton this module is
never imported; the plain kernel, also its oracle in the tests, does the work. Same order of sums.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def jit(kernel: Any) -> Any:
    """`gluon.jit`, typed so that a launch, `kernel[grid](...)`, is understood."""
    return gluon.jit(kernel)


@jit
def make_barriers(num_tiles, STAGES: gl.constexpr, NUM_BYTES: gl.constexpr):
    """One barrier per place of a ring, each expecting the bytes of its first tile."""
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        mbarrier.expect(bars.index(s), NUM_BYTES, pred=s < num_tiles)
    return bars


@jit
def load_weights(desc, top, up, at, bar, tile, tile_up, wanted, GATE: gl.constexpr):
    """One tile of the weights, or of gate and up, into shared memory."""
    tma.async_copy_global_to_shared(desc, [top, at], bar, tile, pred=wanted)
    if GATE:
        tma.async_copy_global_to_shared(desc, [up, at], bar, tile_up, pred=wanted)


@jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next place of a ring; its barrier's phase turns with every round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@jit
def store_gated(acc, acc_up, out_ptr, row, n, inside, width):
    """silu(gate) * up, rounded as the separate kernels round."""
    kind: gl.constexpr = out_ptr.dtype.element_ty
    gate = acc.to(kind).to(gl.float32)
    up = acc_up.to(kind).to(gl.float32)
    activated = (gate / (1.0 + gl.exp(-gate))).to(kind).to(gl.float32)
    place = row.to(gl.int64)[None, :] * width + n[:, None]
    gl.store(out_ptr + place, (activated * up).to(kind), mask=inside)


@jit
def store_scores(acc, row, inside, chunk, slots_ptr, temperature_ptr, peak_ptr, sum_ptr):
    """What `rows.chunk_kernel` finds in this tile of logits [token, row], one chunk of each row."""
    slot = gl.load(slots_ptr + row, mask=inside, other=0)
    temperature = gl.load(temperature_ptr + slot)
    x = acc * gl.where(temperature > 0, 1.0 / temperature, 1.0)[None, :]
    peak = gl.max(x, 0)
    safe = gl.where(peak == -float("inf"), 0.0, peak)
    part = row.to(gl.int64) * gl.num_programs(0) + chunk
    gl.store(peak_ptr + part, peak, mask=inside)
    gl.store(sum_ptr + part, gl.sum(gl.exp(x - safe[None, :]), 0), mask=inside)


@jit
def multiply_tiles(
    x_desc,
    weight_desc,
    row0,
    top,
    up,
    first,
    num_tiles,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    WEIGHTS: gl.constexpr,
    ROWS: gl.constexpr,
    GATE: gl.constexpr,
    layout: gl.constexpr,
):
    """weights[top:, first:] @ x[row0:, first:].T, and the same from row `up` on with GATE."""
    W_BYTES: gl.constexpr = BN * BK * 2 * (2 if GATE else 1)
    X_BYTES: gl.constexpr = BM * BK * 2
    w = gl.allocate_shared_memory(weight_desc.dtype, [WEIGHTS, BN, BK], weight_desc.layout)
    w_up = w
    if GATE:
        w_up = gl.allocate_shared_memory(weight_desc.dtype, [WEIGHTS, BN, BK], weight_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [ROWS, BM, BK], x_desc.layout)
    w_bars = make_barriers(num_tiles, WEIGHTS, W_BYTES)
    x_bars = make_barriers(num_tiles, ROWS, X_BYTES)
    for s in gl.static_range(WEIGHTS):
        at, bar, to = first + s * BK, w_bars.index(s), w.index(s)
        load_weights(weight_desc, top, up, at, bar, to, w_up.index(s), s < num_tiles, GATE)
    gdc_launch_dependents()
    gdc_wait()
    for s in gl.static_range(ROWS):
        place, bar, to = [row0, first + s * BK], x_bars.index(s), x.index(s)
        tma.async_copy_global_to_shared(x_desc, place, bar, to, pred=s < num_tiles)
    acc = gl.zeros([BN, BM], gl.float32, layout)
    acc_up = gl.zeros([BN, BM], gl.float32, layout)
    ws, w_phase, w_last, xs, x_phase, x_last = 0, 0, 0, 0, 0, 0
    for i in range(num_tiles):
        mbarrier.wait(w_bars.index(ws), w_phase)
        mbarrier.wait(x_bars.index(xs), x_phase)
        acc = warpgroup_mma(w.index(ws), x.index(xs).permute((1, 0)), acc, is_async=True)
        if GATE:
            turned = x.index(xs).permute((1, 0))
            acc_up = warpgroup_mma(w_up.index(ws), turned, acc_up, is_async=True)
            acc, acc_up = warpgroup_mma_wait(2, deps=(acc, acc_up))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        # The product of the tiles before these has ended; the next ones take their places.
        w_next, bar, to = i - 1 + WEIGHTS, w_bars.index(w_last), w.index(w_last)
        at, wanted = first + w_next * BK, (i > 0) & (w_next < num_tiles)
        mbarrier.expect(bar, W_BYTES, pred=wanted)
        load_weights(weight_desc, top, up, at, bar, to, w_up.index(w_last), wanted, GATE)
        x_next, bar, to = i - 1 + ROWS, x_bars.index(x_last), x.index(x_last)
        place, wanted = [row0, first + x_next * BK], (i > 0) & (x_next < num_tiles)
        mbarrier.expect(bar, X_BYTES, pred=wanted)
        tma.async_copy_global_to_shared(x_desc, place, bar, to, pred=wanted)
        w_last, x_last = ws, xs
        ws, w_phase = following(ws, w_phase, WEIGHTS)
        xs, x_phase = following(xs, x_phase, ROWS)
    return warpgroup_mma_wait(0, deps=(acc, acc_up))


@jit
def streamed_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    slots_ptr,
    temperature_ptr,
    peak_ptr,
    sum_ptr,
    rows,
    N,
    num_tiles,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    WEIGHTS: gl.constexpr,
    ROWS: gl.constexpr,
    GATE: gl.constexpr,
    SCORED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """As `skinny_kernel`, with rings of WEIGHTS and ROWS tiles; with SCORED the result is logits,
    and what a draw needs of them is stored beside."""
    tile = gl.program_id(0)
    split = gl.program_id(1)
    version = gl.program_id(2)
    row0, top, first = version * rows, version * N + tile * BN, split * num_tiles * BK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
    acc, acc_up = multiply_tiles(
        *(x_desc, weight_desc, row0, top, top + N // 2, first, num_tiles),
        *(BM, BN, BK, WEIGHTS, ROWS, GATE, layout),
    )
    n = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, layout))
    m = gl.arange(0, BM, gl.SliceLayout(0, layout))
    inside = (m < rows)[None, :]
    row = row0 + m
    if GATE:
        store_gated(acc, acc_up, out_ptr, row, n, inside, N // 2)
    else:
        if SCORED:
            some = m < rows
            store_scores(acc, row, some, tile, slots_ptr, temperature_ptr, peak_ptr, sum_ptr)
        row += split * gl.num_programs(2) * rows
        gl.store(out_ptr + row.to(gl.int64)[None, :] * N + n[:, None], acc, mask=inside)


@lru_cache
def _layout(rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


def describe(matrix: Any, rows: int, columns: int) -> TensorDescriptor:
    """A matrix whose tiles of [rows, columns] are copied to shared memory."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _layout(rows, columns))
