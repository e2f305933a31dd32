"""Attention on the CPU over KV blocks, bit-identical for a row whoever stands beside it.

A row attends to its context block by block. Each (row, block) pair is one small product of fixed
shape (query heads of a kv head x block tokens), and a row's pairs are then added up as a binary
tree over its own blocks. So the order of every sum depends on the row's own context alone: not on
other rows, not on whether the row came by decode, by a prefill chunk or by prefill after a crash.
Where a window limits what a row sees, block j is leaf j mod (blocks that a window touches), so that
the tree is no larger than that.

Shapes: T rows, B pairs, N blocks of a row (power of two), KV kv heads, G query heads per kv head,
C tokens of a block, D head dim. Never writes the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PREFILL_PAIRS_MAX = 4096  # keeps the scratch memory of one chunk near the cache
Ints = NDArray[np.int64]


class Pairs(NamedTuple):
    """Every (row, block) pair of decode rows: made once a pass, used by every layer.

    They are arranged in turns: a block that n rows share is in turns 0 .. n - 1. Turn 0 reads the
    blocks [0, num_pool) of the pool where they lie (what nobody has there is used by nobody). The
    blocks of later turns are gathered once, most shared first: turn t has the first `turns[t]`.
    """

    rows: Tensor
    num_pool: int  # 0: turn 0 is of gathered blocks too
    gathered: Tensor  # blocks
    turns: list[int]  # that are of gathered blocks
    owners: Tensor  # the row of each pair
    mask: Tensor  # [B, 1, 1, C]: 0 or -inf
    table: Tensor  # [T, N]: a row's pairs
    absent: Tensor  # [T, N, 1, 1]: blocks that a row does not have


def pair_blocks(
    rows: Ints, positions: Ints, table: Ints, block_tokens: int, window: int = 0
) -> Pairs:
    """Of rows at `positions` with blocks `table` [T, blocks]."""
    counts = positions // block_tokens + 1
    begins = np.maximum(positions + 1 - window, 0) if window else np.zeros_like(positions)
    blocks_max = np.arange(int(counts.max()))
    seen = (blocks_max < counts[:, None]) & (blocks_max >= begins[:, None] // block_tokens)
    row, index = np.nonzero(seen)
    width = _num_leaves(len(blocks_max), window, block_tokens)
    present = np.zeros((len(rows), width), bool)
    present[row, index % width] = True
    blocks = table[row, index]
    used, which, shares = np.unique(blocks, return_inverse=True, return_counts=True)
    turn = np.empty_like(which)
    turn[np.argsort(which, kind="stable")] = np.arange(len(which)) - np.repeat(
        np.cumsum(shares) - shares, shares
    )
    by_shares = np.argsort(-shares, kind="stable")
    sizes = [int((shares > t).sum()) for t in range(shares.max())]
    # Mostly blocks of others: gathering ours costs less than reading them all.
    num_pool = 0 if used[-1] + 1 > 3 * len(used) else int(used[-1]) + 1
    num_gathered = len(used)
    if num_pool:
        num_gathered, sizes[0] = int((shares > 1).sum()), num_pool
    offsets = np.r_[0, np.cumsum(sizes)]
    in_place = (turn == 0) & (num_pool > 0)
    place = offsets[turn] + np.where(in_place, blocks, np.argsort(by_shares)[which])
    owners = np.zeros(offsets[-1], np.int64)
    firsts, lengths = np.zeros_like(owners), np.ones_like(owners)
    owners[place] = rows[row]
    firsts[place] = begins[row] - index * block_tokens
    lengths[place] = np.minimum(positions[row] + 1 - index * block_tokens, block_tokens)
    places = np.zeros(present.shape, np.int64)
    places[row, index % width] = place
    return Pairs(
        torch.from_numpy(rows),
        num_pool,
        torch.from_numpy(used[by_shares][:num_gathered]),
        sizes[1:] if num_pool else sizes,
        torch.from_numpy(owners),
        _seen_mask(torch.from_numpy(firsts), torch.from_numpy(lengths), block_tokens),
        torch.from_numpy(places),
        torch.from_numpy(~present)[:, :, None, None],
    )


def attend_decode(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs) -> Tensor:
    """[rows, KV, G, D] for the decode rows; q is [T, KV, G, D] and already scaled."""
    shape = (len(pairs.owners), *q.shape[1:3])
    queries = q.index_select(0, pairs.owners).flatten(0, 1)
    keys = [part.transpose(1, 2) for part in _of_pairs(k, pairs)]
    score = _multiply(queries, keys).view(*shape, -1).add_(pairs.mask)
    peak, weight, total = _block_softmax(score)
    out = _multiply(weight.flatten(0, 1), _of_pairs(v, pairs)).view(*shape, -1)
    places = pairs.table.view(-1)
    peak, total, out = (
        part.index_select(0, places).unflatten(0, pairs.table.shape) for part in (peak, total, out)
    )
    return _add_up(peak.masked_fill_(pairs.absent, -torch.inf), total, out)


def _of_pairs(pool: Tensor, pairs: Pairs) -> list[Tensor]:
    """Keys or values, [pair * KV, C, D] of each turn."""
    gathered = pool.index_select(0, pairs.gathered).flatten(0, 1)
    parts = [gathered[: size * pool.shape[1]] for size in pairs.turns]
    return [pool[: pairs.num_pool].flatten(0, 1), *parts] if pairs.num_pool else parts


def _multiply(left: Tensor, right: list[Tensor]) -> Tensor:
    parts = zip(left.split([len(part) for part in right]), right, strict=True)
    products = [torch.bmm(*pair) for pair in parts]
    return products[0] if len(products) == 1 else torch.cat(products)


def attend_prefill(
    q: Tensor, k: Tensor, v: Tensor, position: int, blocks: list[int], window: int = 0
) -> Tensor:
    """[count, KV, G, D] for the rows of a chunk from `position` on; q is their scaled queries."""
    tokens = k.shape[2]
    step = max(1, PREFILL_PAIRS_MAX // _num_leaves(len(blocks), window, tokens))
    parts = []
    for part in q.split(step):
        num_blocks = -(-(position + len(part)) // tokens)
        parts.append(_prefill_part(part, k, v, position, blocks[:num_blocks], window))
        position += len(part)
    return torch.cat(parts)


def _prefill_part(
    q: Tensor, k: Tensor, v: Tensor, position: int, blocks: list[int], window: int
) -> Tensor:
    count, num_kv, num_q, dim = q.shape
    tokens, width = k.shape[2], _num_leaves(len(blocks), window, k.shape[2])
    out = q.new_zeros((count, width, num_kv, num_q, dim))
    total, peak = torch.zeros_like(out[..., 0]), torch.full_like(out[..., 0], -torch.inf)
    context = torch.arange(position + 1, position + count + 1)
    begins = (context - window).clamp_(min=0) if window else torch.zeros_like(context)
    for j in range(int(begins[0]) // tokens, len(blocks)):
        # Rows before the first do not see this block yet, those from the last on no longer.
        first, last = max(0, j * tokens - position), count
        if window:
            last = min(count, (j + 1) * tokens - 1 + window - position)
        rows = slice(first, last)
        score = q.new_empty((last - first, num_kv, num_q, tokens))
        for h in range(num_kv):
            score[:, h] = torch.bmm(q[rows, h], k[blocks[j], h].t().expand(last - first, -1, -1))
        if (j + 1) * tokens > position + 1 + first or begins[last - 1] > j * tokens:
            length = (context[rows] - j * tokens).clamp_(max=tokens)
            score += _seen_mask(begins[rows] - j * tokens, length, tokens)
        leaf = j % width
        peak[rows, leaf], weight, total[rows, leaf] = _block_softmax(score)
        for h in range(num_kv):
            values = v[blocks[j], h].expand(last - first, -1, -1)
            out[rows, leaf, h] = torch.bmm(weight[:, h], values)
    return _add_up(peak, total, out)


def _block_softmax(score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Peak, exp(score - peak) and its sum, of each row of each pair."""
    peak = score.amax(-1)
    weight = score.sub_(peak[..., None]).exp_()
    return peak, weight, weight.sum(-1)


def _add_up(peak: Tensor, total: Tensor, out: Tensor) -> Tensor:
    """Combine the blocks of each row: a tree of sums over axis 1, whose size is a power of two.

    Blocks a row does not have come with a peak of -inf and so enter as zeros; x + 0 is x, and a
    longer table changes nothing.
    """
    share = (peak - peak.amax(1, keepdim=True)).exp_()
    total = total.mul_(share)
    out = out.mul_(share[..., None])
    while out.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
        out = out[:, 0::2] + out[:, 1::2]
    return out[:, 0] / total[:, 0, ..., None]


def _seen_mask(first: Tensor, length: Tensor, tokens: int) -> Tensor:
    """[B, 1, 1, C]: 0 for tokens [first, length), -inf for others."""
    token = torch.arange(tokens)
    hidden = (token >= length[:, None]) | (token < first[:, None])
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None, None, :]


def _num_leaves(num_blocks: int, window: int, tokens: int) -> int:
    """Of the tree over a row's blocks: so many as there are, or as a window touches."""
    leaves = _power_of_two(num_blocks)
    return min(leaves, _power_of_two(-(-(window - 1) // tokens) + 1)) if window else leaves


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
