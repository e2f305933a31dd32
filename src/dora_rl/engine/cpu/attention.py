"""Attention on the CPU over KV blocks, bit-identical for a row whoever stands beside it.

A row attends to its context block by block. Each (row, block) pair is one small product of fixed
shape (query heads of a kv head x block tokens), and a row's pairs are then added up as a binary
tree over its own blocks. So the order of every sum depends on the row's own context alone: not on
other rows, not on whether the row came by decode, by a prefill chunk or by prefill after a crash.

Shapes: T rows, B pairs, N blocks of a row (power of two), KV kv heads, G query heads per kv head,
C tokens of a block, D head dim. Never writes the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dora_rl.engine.cpu.batch import DecodePairs, Prefill

PREFILL_PAIRS_MAX = 4096  # keeps the scratch memory of one chunk near the cache


@dataclass(slots=True)
class PairTensors:
    """`DecodePairs` as tensors, made once a step and used by every layer."""

    rows: Tensor | None  # None: every row of the batch
    num_pool: int
    shared: Tensor
    owners: list[Tensor]
    mask: Tensor  # [B, 1, 1, C]: 0 or -inf
    table: Tensor  # [T, N]
    absent: Tensor  # [T, N, 1, 1]: blocks that a row does not have

    @staticmethod
    def make(pairs: DecodePairs, block_tokens: int) -> PairTensors:
        num_rows, width = pairs.table.shape
        padded = _power_of_two(width)
        table = np.zeros((num_rows, padded), np.int64)
        table[:, :width] = pairs.table
        valid = np.zeros((num_rows, padded), np.bool_)
        valid[:, :width] = pairs.valid
        return PairTensors(
            None if pairs.rows is None else torch.from_numpy(pairs.rows),
            pairs.num_pool,
            torch.from_numpy(pairs.shared),
            [torch.from_numpy(owner) for owner in pairs.owners],
            _length_mask(torch.from_numpy(pairs.lengths), block_tokens),
            torch.from_numpy(table),
            torch.from_numpy(~valid)[:, :, None, None],
        )


def attend_decode(q: Tensor, k: Tensor, v: Tensor, pairs: PairTensors) -> Tensor:
    """[rows, KV, G, D] for the decode rows; q is [T, KV, G, D] and already scaled."""
    _, _, num_q, dim = q.shape
    tokens = k.shape[2]
    shared = pairs.shared
    k_shared = k.index_select(0, shared) if len(shared) else k[:0]
    v_shared = v.index_select(0, shared) if len(shared) else v[:0]
    scores, values = [], []
    for index, owner in enumerate(pairs.owners):
        in_place = index == 0 and pairs.num_pool
        keys = k[: pairs.num_pool] if in_place else k_shared[: len(owner)]
        values.append(v[: pairs.num_pool] if in_place else v_shared[: len(owner)])
        queries = q.index_select(0, owner).view(-1, num_q, dim)
        scores.append(torch.bmm(queries, keys.view(-1, tokens, dim).transpose(1, 2)))
    score = scores[0] if len(scores) == 1 else torch.cat(scores)
    score = score.view(len(pairs.mask), -1, num_q, tokens).add_(pairs.mask)
    peak, weight, total = _block_softmax(score)
    flat = weight.view(-1, num_q, tokens)
    outs, start = [], 0
    for value in values:
        value = value.view(-1, tokens, dim)
        outs.append(torch.bmm(flat[start : start + len(value)], value))
        start += len(value)
    out = (outs[0] if len(outs) == 1 else torch.cat(outs)).view(len(pairs.mask), -1, num_q, dim)
    rows, width = pairs.table.shape
    index = pairs.table.view(-1)
    out = out.index_select(0, index).view(rows, width, *out.shape[1:])
    total = total.index_select(0, index).view(rows, width, *total.shape[1:])
    if width == 1:
        return out[:, 0].div_(total[:, 0, ..., None])
    peak = peak.index_select(0, index).view(rows, width, *peak.shape[1:])
    return _add_up(peak.masked_fill_(pairs.absent, -torch.inf), total, out)


def attend_prefill(q: Tensor, k: Tensor, v: Tensor, chunk: Prefill) -> Tensor:
    """[count, KV, G, D] for the rows of one chunk; q is their scaled queries."""
    tokens = k.shape[2]
    step = max(1, PREFILL_PAIRS_MAX // _power_of_two(len(chunk.blocks)))
    parts = []
    for start in range(0, chunk.count, step):
        part = q[start : start + step]
        position = chunk.position + start
        num_blocks = -(-(position + len(part)) // tokens)
        parts.append(_prefill_part(part, k, v, position, chunk.blocks[:num_blocks]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _prefill_part(
    q: Tensor, k: Tensor, v: Tensor, position: int, blocks: tuple[int, ...]
) -> Tensor:
    count, num_kv, num_q, dim = q.shape
    tokens, width = k.shape[2], _power_of_two(len(blocks))
    peak = q.new_full((count, width, num_kv, num_q), -torch.inf)
    total = q.new_zeros((count, width, num_kv, num_q))
    out = q.new_zeros((count, width, num_kv, num_q, dim))
    context = torch.arange(position + 1, position + count + 1)
    for j, block in enumerate(blocks):
        first = max(0, j * tokens - position)  # rows before it do not see this block
        num = count - first
        score = q.new_empty((num, num_kv, num_q, tokens))
        for h in range(num_kv):
            keys = k[block, h].t().expand(num, -1, -1)
            score[:, h] = torch.bmm(q[first:, h], keys)
        if (j + 1) * tokens > position + 1 + first:
            length = (context[first:] - j * tokens).clamp_(max=tokens)
            score += _length_mask(length, tokens)
        peak[first:, j], weight, total[first:, j] = _block_softmax(score)
        for h in range(num_kv):
            values = v[block, h].expand(num, -1, -1)
            out[first:, j, h] = torch.bmm(weight[:, h], values)
    if width == 1:
        return out[:, 0] / total[:, 0, ..., None]
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


def _length_mask(length: Tensor, tokens: int) -> Tensor:
    """[B, 1, 1, C]: 0 where the token exists, -inf beyond."""
    beyond = torch.arange(tokens) >= length[:, None]
    return torch.zeros(beyond.shape).masked_fill_(beyond, -torch.inf)[:, None, None, :]


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
