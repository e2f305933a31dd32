"""Decode attention on a Hopper, written in CUDA C (`paged.cu`).

A program is one warp with one (row, kv head, split), as in `attention.decode_kernel`, its oracle.
It has a ring of tiles, keys and values in turn, and asks for the next as soon as it has used one:
the programs of a processor fill its shared memory, so that the memory is never without a question,
and none of them ever waits for another warp. What it may ask for before the kernel before has ended
(all but the tile of the newest token) it asks for at once.

Keys are the left operand of the first product and values, turned, of the second, so that a tile of
the tensor cores has 16 tokens or dimensions by eight query heads, not 16 mostly empty rows of
queries by eight tokens. Where `fits` says no, the kernels in Triton are used.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from dora_rl.engine.cuda.kernels import driver
from dora_rl.engine.cuda.kernels.attention import merge, scale_of, sums_of
from dora_rl.engine.cuda.kernels.cuts import RING, Ring, Splits, choose_ring

WAVE = 3  # programs to a processor, where rows are so few that their contexts are split
GROUP_MAX = 8  # query heads of a kv head


def fits(pool: Tensor, group: int) -> bool:
    """Whether `attend` can do it for `group` query heads of each kv head of the pool."""
    block, dim = pool.shape[3:]
    if pool.dtype != torch.bfloat16 or dim not in (64, 128) or group > GROUP_MAX:
        return False
    return _is_usable(pool.device, dim, group, block)


@lru_cache
def _is_usable(device: torch.device, dim: int, group: int, block: int) -> bool:
    return driver.can_run(
        device, lambda: _kernel(device.index, dim, group, block, RING, 0), "attention to Triton"
    )


@lru_cache
def _kernel(
    _device: int | None, dim: int, group: int, block: int, ring: Ring, fresh: int
) -> driver.Kernel:
    tile = min(ring.tokens, block)
    source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    defines = {"DIM": dim, "GROUP": group, "BLOCK": block, "TILE": tile, "FRESH": fresh}
    defines["RING"] = ring.num_bytes // (2 * tile * dim)
    code = driver.compile_source(source, defines)
    return driver.load(code, "paged", 32, ring.num_bytes)


def attend(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    splits: Splits,
    num_processors: int,
    scale: float = 0.0,
    fresh: int = 0,
) -> Tensor:
    """As `attention.attend_decode`, without a window. Of a row's context as many as `fresh` tokens
    before its own may be written by the kernel before."""
    rows, num_kv, group, dim = q.shape
    assert q.is_contiguous()
    assert pool.is_contiguous()
    assert (table.dtype, slots.dtype, positions.dtype) == (torch.int32, torch.int64, torch.int32)
    out = torch.empty_like(q)
    sums = sums_of(out, splits)
    numbers = (scale_of(dim, scale), pool.shape[1], table.stride(0), splits.blocks_min)
    ring = choose_ring(rows * num_kv * splits.number, num_processors)
    kernel = _kernel(q.device.index, dim, group, pool.shape[3], ring, fresh)
    arguments = (q, pool, table, slots, positions, out, *sums, *numbers)
    driver.launch(kernel, (num_kv, rows, splits.number), arguments)
    if splits.number > 1:
        merge(*sums, out)
    return out
