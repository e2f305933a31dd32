"""Sparse MLP on a GPU: one grouped product over all experts of all versions, with static shapes.

Each row visits `top_k` experts. Visits are sorted by expert and every expert's visits are padded to
whole tiles, so that a tile multiplies with one expert's weights; the tile count is the worst case,
and tiles past the end return at once. Nothing depends on values the host would have to read, so a
CUDA graph can hold it.

    visit    row * top_k + rank              V = rows * top_k of them
    order    [tiles * BM] -> visit, or V where a tile is padding
    expert   [tiles] -> expert of the tile (version slot * experts + expert), or -1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dora_rl.engine.cpu.decoder import route
from dora_rl.engine.cuda.kernels.overlap import jit
from dora_rl.engine.cuda.kernels.rows import gate
from dora_rl.model.spec import MoeSpec


@jit
def grouped_kernel(
    x_ptr,
    weight_ptr,
    share_ptr,
    order_ptr,
    expert_ptr,
    out_ptr,
    num_visits,
    num_out,
    num_in,
    DIVIDE: tl.constexpr,
    SCALE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[visit] = weight[expert] @ x[visit // DIVIDE], times the visit's share if SCALE."""
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    visit = tl.load(order_ptr + tile * BM + tl.arange(0, BM)).to(tl.int64)
    real = visit < num_visits
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = x_ptr + (visit // DIVIDE)[:, None] * num_in
    columns = weight_ptr + (expert * num_out + n)[None, :] * num_in
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, num_in, BK):
        inside = start + k < num_in
        x = tl.load(rows + (start + k)[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        w_inside = (n[None, :] < num_out) & inside[:, None]
        w = tl.load(columns + (start + k)[:, None], mask=w_inside, other=0.0)
        acc += tl.dot(x, w, input_precision=PRECISION)
    if SCALE:
        share = tl.load(share_ptr + visit, mask=real, other=0.0).to(tl.float32)
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) * share[:, None]
    place = out_ptr + visit[:, None] * num_out + n[None, :]
    inside_out = real[:, None] & (n[None, :] < num_out)
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=inside_out)


def sort_visits(expert: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """`order` and tile experts of flat visits, without reading anything back."""
    visits = len(expert)
    device = expert.device
    num_tiles = visits // tile + min(num_experts, visits)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    tiles_each = (counts + tile - 1) // tile
    ends = tiles_each.cumsum(0)
    sorted_expert, by_expert = expert.sort(stable=True)
    rank = torch.arange(visits, device=device) - (counts.cumsum(0) - counts)[sorted_expert]
    order = torch.full((num_tiles * tile,), visits, dtype=torch.int64, device=device)
    order[(ends - tiles_each)[sorted_expert] * tile + rank] = by_expert
    tiles = torch.arange(num_tiles, device=device)
    tile_expert = torch.searchsorted(ends, tiles, right=True)
    return order, torch.where(tiles < ends[-1], tile_expert, -1)


def choose_experts(
    logits: Tensor, moe: MoeSpec, dtype: torch.dtype, num_versions: int
) -> tuple[Tensor, Tensor]:
    """Weights and expert numbers of [version, row] rows, counted over all version slots."""
    share, expert = route(logits, moe, dtype)
    if num_versions > 1:
        version = torch.arange(len(logits), device=logits.device) // (len(logits) // num_versions)
        expert = expert + version[:, None] * moe.num_experts
    return share, expert


def sparse_rows(h: Tensor, share: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Rows through their experts. `expert` [rows, top_k] counts over all version slots;
    `gate_up` [experts, 2 I, D] and `down` [experts, D, I] are stacked the same way."""
    rows, top_k = expert.shape
    visits, width = rows * top_k, h.shape[1]
    tile = 16 if visits <= 16 * len(down) else 64
    order, tile_expert = sort_visits(expert.flatten(), len(down), tile)
    flat_share = share.flatten()
    inner2 = gate_up.shape[1]
    hidden = torch.empty((visits, inner2), dtype=h.dtype, device=h.device)
    _grouped(h, gate_up, flat_share, order, tile_expert, hidden, top_k, False, tile)
    activated = gate(hidden)
    out = torch.empty((visits, width), dtype=h.dtype, device=h.device)
    _grouped(activated, down, flat_share, order, tile_expert, out, 1, True, tile)
    return out.view(rows, top_k, width).sum(1)


def _grouped(
    x: Tensor,
    weight: Tensor,
    share: Tensor,
    order: Tensor,
    tile_expert: Tensor,
    out: Tensor,
    divide: int,
    scale: bool,
    tile: int,
) -> None:
    _, num_out, num_in = weight.shape
    block_n = 64
    grouped_kernel[(len(tile_expert), triton.cdiv(num_out, block_n))](
        x,
        weight,
        share,
        order,
        tile_expert,
        out,
        len(out),
        num_out,
        num_in,
        DIVIDE=divide,
        SCALE=scale,
        BM=tile,
        BN=block_n,
        BK=64,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3,
    )
