"""Products of few rows with large matrices: the weights are streamed once, at memory speed.

    x [version * rows, K]   weight [version, N, K]   ->   parts [split, version * rows, N], float32

A program owns (tile of N, split of K, version) and all rows of its version, so that no weight is
read twice. Tiles come through the tensor memory accelerator. The sums over the splits are left to
the kernel that reads the result next (norm, attention), which costs nothing extra. The weights are
the left operand: their tile is what fills the tensor core. Up to `STREAMED_ROWS_MAX` rows the
kernel of `streamed.py` does the same with its weights in flight before its rows are known.

Everything else (`tiles_of` gives None) is for `wide.py` and cuBLAS, the oracle in the tests.
Invariant: rows beyond a version's own are computed but never written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dora_rl.engine.cuda.kernels.overlap import begin, is_hopper, jit, overlap, ready
from dora_rl.engine.cuda.kernels.rows import Chunks, empty_chunks

ROWS_MAX = 128  # above, `wide.py` or cuBLAS
ROWS_FEW = 16  # up to here two programs fit on a processor
TILE_N, TILE_K = 64, 128
SPLITS_MAX = 8
STREAMED_ROWS_MAX = 64 if triton.__version__.startswith("3.6.") else 0  # Gluon may change
STREAMED_BYTES = 208 * 1024  # for tiles, of a processor's 227 KB of shared memory
ROW_STAGES_MAX = 8
MANY_WAVES = 4  # as many tiles for every processor: two programs on each hide each other's ends


class Tiles(NamedTuple):
    """How a product is cut: rows of N and values of K per tile, splits of K, tiles in flight.

    With `row_stages` the streamed kernel has that many tiles of x in flight beside the weights.
    """

    n: int
    k: int
    splits: int
    stages: int
    row_stages: int = 0


@jit
def skinny_kernel(
    x_desc,
    weight_desc,
    out_ptr,
    rows,
    N,
    num_tiles,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """With GATE the upper half of the weight's rows is `up`: silu(gate) * up is written."""
    begin(OVERLAP)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    version = tl.program_id(2)
    top = version * N + tile * BN
    first = split * num_tiles * BK
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = tl.zeros([BN, BM], tl.float32)
    ready(OVERLAP)
    for i in range(num_tiles):
        at = first + i * BK
        x = x_desc.load([version * rows, at]).T
        acc = tl.dot(weight_desc.load([top, at]), x, acc)
        if GATE:
            acc_up = tl.dot(weight_desc.load([top + N // 2, at]), x, acc_up)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    inside = m[None, :] < rows
    row = version * rows + m
    if GATE:
        kind = out_ptr.dtype.element_ty
        gate = acc.to(kind).to(tl.float32)
        up = acc_up.to(kind).to(tl.float32)
        activated = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
        place = row.to(tl.int64)[None, :] * (N // 2) + n[:, None]
        tl.store(out_ptr + place, (activated * up).to(kind), mask=inside)
    else:
        row += split * tl.num_programs(2) * rows
        tl.store(out_ptr + row.to(tl.int64)[None, :] * N + n[:, None], acc, mask=inside)


def tiles_of(rows: int, weight: Tensor, num_processors: int, gate: bool = False) -> Tiles | None:
    """The cut for `rows` rows per version, or None where cuBLAS is used.

    One program per processor (two for few rows), as nearly as powers of two allow.
    """
    versions, n, k = weight.shape
    if weight.dtype != torch.bfloat16 or rows > ROWS_MAX or not _has_tensor_copies(weight.device):
        return None
    num_tiles = versions * (n // TILE_N)
    if n % (2 * TILE_N) or k % TILE_K:
        return None
    few = rows <= ROWS_FEW
    if gate:
        enough = num_tiles // 2 >= num_processors // 2
        plain = Tiles(TILE_N, TILE_K, 1, 4 if few else 3)
        return _streamed(plain, rows, weight, STREAMED_BYTES, gate) if enough else None
    splits = 1
    room = num_processors * (2 if few else 1)
    while splits < SPLITS_MAX and num_tiles * splits * 2 <= room:
        if k % (TILE_K * splits * 2):
            break
        splits *= 2
    plain = Tiles(TILE_N, TILE_K, splits, 4)
    two = few or num_tiles >= MANY_WAVES * num_processors
    return _streamed(plain, rows, weight, STREAMED_BYTES // (2 if two else 1), gate)


def _streamed(plain: Tiles, rows: int, weight: Tensor, num_bytes: int, gate: bool) -> Tiles:
    """As many tiles as `num_bytes` of shared memory hold: all of a short K, else as deep a ring."""
    if rows > STREAMED_ROWS_MAX or not is_hopper(weight.device):
        return plain
    num_tiles = weight.shape[2] // plain.splits // plain.k
    weight_bytes = plain.n * plain.k * 2 * (2 if gate else 1)
    row_bytes = _tile_rows(rows) * plain.k * 2
    stages = min(num_tiles, num_bytes // (weight_bytes + row_bytes))
    row_stages = min(num_tiles, ROW_STAGES_MAX, (num_bytes - stages * weight_bytes) // row_bytes)
    return plain._replace(stages=stages, row_stages=row_stages)


def _tile_rows(rows: int) -> int:
    return max(ROWS_FEW, triton.next_power_of_2(rows))


def _has_tensor_copies(device: torch.device) -> bool:
    return overlap(device)["OVERLAP"]  # both came with Hopper


def multiply_scored(
    x: Tensor, head: Tensor, tiles: Tiles, slots: Tensor, temperature: Tensor
) -> tuple[Tensor, Chunks]:
    """Logits [row, N] by the streamed kernel, and in each tile what a draw needs to know of it."""
    chunks = empty_chunks(len(x), head.shape[1], tiles.n, x.device)
    scores = (slots, temperature, chunks.peak, chunks.total)
    return multiply(x, head, tiles, scores=scores)[0], chunks


def multiply(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    gate: bool = False,
    scores: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Parts [split, row, N]; with `gate`, the gated rows [row, N / 2]. `scores`: see above."""
    versions, n, k = weight.shape
    rows = len(x) // versions
    width = n // 2 if gate else n
    assert width % tiles.n == 0
    assert k % (tiles.k * tiles.splits) == 0
    assert tiles.splits == 1 or not (gate or scores)
    assert tiles.row_stages or not scores, "of the streamed kernel alone"
    if gate:
        out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    else:
        out = torch.empty((tiles.splits, len(x), n), dtype=torch.float32, device=x.device)
    tile_m, num_tiles = _tile_rows(rows), k // tiles.splits // tiles.k
    grid = (width // tiles.n, tiles.splits, versions)
    stacked = weight.view(versions * n, k)
    if tiles.row_stages:
        assert min(tiles.stages, tiles.row_stages) >= min(2, num_tiles)  # one in use, one coming
        from dora_rl.engine.cuda.kernels import streamed

        streamed.streamed_kernel[grid](
            streamed.describe(x, tile_m, tiles.k),
            streamed.describe(stacked, tiles.n, tiles.k),
            out,
            *(scores or (out,) * 4),
            rows,
            n,
            num_tiles,
            BM=tile_m,
            BN=tiles.n,
            BK=tiles.k,
            WEIGHTS=tiles.stages,
            ROWS=tiles.row_stages,
            GATE=gate,
            SCORED=scores is not None,
            num_warps=4,
            launch_pdl=True,
        )
        return out
    skinny_kernel[grid](
        TensorDescriptor.from_tensor(x, [tile_m, tiles.k]),
        TensorDescriptor.from_tensor(stacked, [tiles.n, tiles.k]),
        out,
        rows,
        n,
        num_tiles,
        BM=tile_m,
        BN=tiles.n,
        BK=tiles.k,
        GATE=gate,
        num_warps=4,
        num_stages=tiles.stages,
        **overlap(x.device),
    )
    return out
