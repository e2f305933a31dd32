"""Products of 129 to 256 rows with large matrices on a Hopper, written in CUDA C (`wide.cu`).

    x [version * rows, K]   weight [version, N, K]   ->   parts [split, version * rows, N]

As in `skinny.py` a program owns all rows of x, the weights are the left operand, and who reads the
result next sums up its parts. With so many rows the tensor cores are what a program waits for, so
that it needs what Triton 3.6 has no words for: one warp that copies while two warp groups multiply
with operands in shared memory; tiles that make 128 programs of 12,288 rows; gate and up interleaved
by the copy, so that one thread has both of an output. The weights of the first steps are on their
way before the kernel before has ended.

cuBLAS stays for everything else (`cut_of` gives None) and is the oracle in the tests. Invariant:
rows beyond a version's own are computed but never written.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dora_rl.engine.cuda import driver

ROWS_MIN, ROWS_MAX = 129, 256
TILE, TILE_K = 64, 64
RING_BYTES = 200 * 1024
NUM_THREADS = 288  # two warp groups and a warp
SPLITS = (1, 2, 4, 8)


class Tiles(IntEnum):
    """What a program has: 128 rows of weights, 64, or 64 and half of the next 64 of a pair."""

    WHOLE = 0
    HALF = 1
    SHARED = 2


ROWS_OF = {Tiles.WHOLE: 128, Tiles.HALF: 64, Tiles.SHARED: 96}  # of weights, in a program
# Measured on an H200, in cycles: a step of 64 values of K; a column of a part, to write and read.
STEP_CYCLES = {Tiles.WHOLE: 1060, Tiles.HALF: 580, Tiles.SHARED: 790}
COLUMN_CYCLES = 0.4


class Cut(NamedTuple):
    """How a product is cut into programs: tiles of the weights, splits of K."""

    tiles: Tiles
    splits: int = 1


def cut_of(rows: int, weight: Tensor, num_processors: int, gate: bool = False) -> Cut | None:
    """The fastest cut for `rows` rows per version, or None where cuBLAS is used."""
    if not ROWS_MIN <= rows <= ROWS_MAX or weight.dtype != torch.bfloat16:
        return None
    versions, n, k = weight.shape
    cuts = [
        Cut(tiles, splits)
        for tiles in Tiles
        for splits in ((1,) if gate else SPLITS)
        if n % (2 * ROWS_OF[tiles]) == 0
        and k % (TILE_K * splits) == 0
        # All at once, and most processors busy: elsewhere cuBLAS may be faster.
        and 2 * num_processors <= 3 * (versions * n // ROWS_OF[tiles] * splits)
        and versions * n // ROWS_OF[tiles] * splits <= num_processors
    ]
    if not cuts or not _is_usable(weight.device):
        return None
    return min(cuts, key=lambda cut: _cycles(cut, n, k))


def _cycles(cut: Cut, n: int, k: int) -> float:
    """What the choice makes: the steps of a program, and all parts to write and read."""
    steps = k // cut.splits // TILE_K
    return steps * STEP_CYCLES[cut.tiles] + cut.splits * n * COLUMN_CYCLES


@lru_cache
def _is_usable(device: torch.device) -> bool:
    return driver.can_run(
        device, lambda: _kernel(device.index, Tiles.HALF, False), "products of 129 rows to cuBLAS"
    )


@lru_cache
def _kernel(_device: int | None, tiles: Tiles, gate: bool) -> driver.Kernel:
    stage_bytes = ((1 if tiles is Tiles.HALF else 2) * TILE + ROWS_MAX) * TILE_K * 2
    stages = RING_BYTES // stage_bytes
    code = driver.compile_source(source(), {"TILES": tiles, "GATE": gate, "STAGES": stages})
    return driver.load(code, "wide", NUM_THREADS, stages * stage_bytes)


def source() -> str:
    """`wide.cu` with its products, whose operands are too many to write by hand."""
    text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return text.replace("PRODUCTS", _product(ROWS_MAX) + _product(ROWS_MAX // 2), 1)


def _product(rows: int) -> str:
    """sum += weights [64, 16] @ x [rows, 16].T, or sum = that, by one warp group."""
    count = rows // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sum[{i}])' for i in range(count))
    weights, x, add = (f"%{count + i}" for i in range(3))
    name = f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16"
    return f"""
template <> __device__ __forceinline__
void multiply_add<{rows}>(float (&sum)[{count}], u64 weights, u64 x, int add) {{
  asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, {add}, 0;\\n"
               "{name} {{{sums}}}, {weights}, {x}, add, 1, 1, 0, 0;\\n}}"
               : {operands} : "l"(weights), "l"(x), "r"(add));
}}
"""


def multiply(x: Tensor, weight: Tensor, cut: Cut, gate: bool = False) -> Tensor:
    """Parts [split, row, N]; with `gate`, the gated rows [row, N / 2]."""
    versions, n, k = weight.shape
    rows = len(x) // versions
    assert rows <= ROWS_MAX
    assert n % (2 * ROWS_OF[cut.tiles]) == 0
    assert k % (TILE_K * cut.splits) == 0
    assert cut.splits == 1 or not gate
    assert x.is_contiguous()
    assert weight.is_contiguous()
    shape = (len(x), n // 2) if gate else (cut.splits, len(x), n)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    maps = (_rows_map(x), _gated_map(weight) if gate else _weight_map(weight))
    grid = (n // ROWS_OF[cut.tiles], cut.splits, versions)
    kernel = _kernel(x.device.index, cut.tiles, gate)
    driver.launch(kernel, grid, (*maps, out, rows, n, k // cut.splits // TILE_K))
    return out


def _rows_map(x: Tensor) -> Any:
    rows, k = x.shape
    return driver.tensor_map(x, (k, rows), (k,), (TILE_K, ROWS_MAX))


def _weight_map(weight: Tensor) -> Any:
    versions, n, k = weight.shape
    return driver.tensor_map(weight, (k, versions * n), (k,), (TILE_K, TILE))


def _gated_map(weight: Tensor) -> Any:
    """Eight rows of gate, the same eight of up, the next eight of gate, ..."""
    versions, n, k = weight.shape
    sizes, strides = (k, 8, 2, n // 16, versions), (k, n // 2 * k, 8 * k, n * k)
    return driver.tensor_map(weight, sizes, strides, (TILE_K, 8, 2, TILE // 16, 1))
