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

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora_rl.engine.cuda.kernels import driver
from dora_rl.engine.cuda.kernels.cuts import CUT_K, CUT_ROWS_MAX, ROWS_OF, Cut, Tiles, choose_cut

TILE = 64  # rows of weights
RING_BYTES = 200 * 1024
NUM_THREADS = 288  # two warp groups and a warp


def cut_of(rows: int, weight: Tensor, num_processors: int, gate: bool = False) -> Cut | None:
    """The fastest cut for `rows` rows per version, or None where cuBLAS is used."""
    if weight.dtype != torch.bfloat16:
        return None
    versions, n, k = weight.shape
    cut = choose_cut(rows, versions, n, k, num_processors, gate)
    return cut if cut is not None and _is_usable(weight.device) else None


@lru_cache
def _is_usable(device: torch.device) -> bool:
    return driver.can_run(
        device, lambda: _kernel(device.index, Tiles.HALF, False), "products of 129 rows to cuBLAS"
    )


@lru_cache
def _kernel(_device: int | None, tiles: Tiles, gate: bool) -> driver.Kernel:
    stage_bytes = ((1 if tiles is Tiles.HALF else 2) * TILE + CUT_ROWS_MAX) * CUT_K * 2
    stages = RING_BYTES // stage_bytes
    code = driver.compile_source(source(), {"TILES": tiles, "GATE": gate, "STAGES": stages})
    return driver.load(code, "wide", NUM_THREADS, stages * stage_bytes)


def source() -> str:
    """`wide.cu` with its products, whose operands are too many to write by hand."""
    text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return text.replace("PRODUCTS", _product(CUT_ROWS_MAX) + _product(CUT_ROWS_MAX // 2), 1)


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
    assert rows <= CUT_ROWS_MAX
    assert n % (2 * ROWS_OF[cut.tiles]) == 0
    assert k % (CUT_K * cut.splits) == 0
    assert cut.splits == 1 or not gate
    assert x.is_contiguous()
    assert weight.is_contiguous()
    shape = (len(x), n // 2) if gate else (cut.splits, len(x), n)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    maps = (_rows_map(x), _gated_map(weight) if gate else _weight_map(weight))
    grid = (n // ROWS_OF[cut.tiles], cut.splits, versions)
    kernel = _kernel(x.device.index, cut.tiles, gate)
    driver.launch(kernel, grid, (*maps, out, rows, n, k // cut.splits // CUT_K))
    return out


def _rows_map(x: Tensor) -> Any:
    rows, k = x.shape
    return driver.tensor_map(x, (k, rows), (k,), (CUT_K, CUT_ROWS_MAX))


def _weight_map(weight: Tensor) -> Any:
    versions, n, k = weight.shape
    return driver.tensor_map(weight, (k, versions * n), (k,), (CUT_K, TILE))


def _gated_map(weight: Tensor) -> Any:
    """Eight rows of gate, the same eight of up, the next eight of gate, ..."""
    versions, n, k = weight.shape
    sizes, strides = (k, 8, 2, n // 16, versions), (k, n // 2 * k, 8 * k, n * k)
    return driver.tensor_map(weight, sizes, strides, (CUT_K, 8, 2, TILE // 16, 1))
