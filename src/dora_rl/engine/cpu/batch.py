"""The rows of one pass, as arrays: built from spans on the host, read by the model.

Rows are ordered by version; each version's rows are padded to whole tiles, so that every matrix
product sees complete tiles of one version. Inside a version, decode rows come first:

    version 0: d d d d p p p p p p - - - -   version 1: d d p p p ... - -
               |decode| prefill  | padding

Padding rows carry token 0 at position 0 and write into the scrap block. Never touches the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dora_rl.engine.plan import Span

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) multiply with the weights in `slot`."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """A chunk: rows [row, row + count) hold positions [position, position + count)."""

    row: int
    count: int
    position: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodePairs:
    """Every (row, block) pair of the decode rows, arranged in rounds.

    Round 0 covers each block once; a block shared by n rows appears in rounds 0 .. n - 1. Blocks
    are sorted by sharing, so round r uses the first `len(owners[r])` of `shared`. `table[row, j]`
    is where the pair (row, j-th block) stands in the concatenation of all rounds. In a batch of
    decode rows only, `rows` is None and the table has every row, padding included (those point at
    pair 0, whatever it is); otherwise it has the rows listed in `rows`.
    """

    rows: Ints | None
    num_pool: int  # round 0 reads pool blocks [0, num_pool) in place; 0: gathers `shared`
    shared: Ints
    owners: tuple[Ints, ...]
    lengths: Ints  # valid tokens of each pair, in order of the concatenation
    table: Ints
    valid: NDArray[np.bool_]


@dataclass(slots=True)
class HostBatch:
    """One pass in numpy."""

    token_ids: Ints
    positions: Ints
    write_blocks: Ints
    segments: list[Segment]
    decode: DecodePairs | None
    prefills: list[Prefill]
    logit_rows: Ints
    logit_spans: list[Span] = field(default_factory=list)


class BlockTables:
    """Block numbers of every running request, by slot; kept up to date at O(1) a step."""

    def __init__(self, seqs_max: int, blocks_per_seq_max: int) -> None:
        self.table = np.zeros((seqs_max, blocks_per_seq_max), np.int64)

    def update(self, spans: Sequence[Span]) -> None:
        for span in spans:
            seq = span.seq
            if seq.table_dirty:
                self.table[seq.slot, : len(seq.blocks)] = seq.blocks
                seq.table_dirty = False


def build(
    groups: Sequence[tuple[int, list[Span]]],
    tables: BlockTables,
    block_tokens: int,
    tile_rows: int,
    scrap_block: int,
) -> HostBatch:
    """Rows of `groups`, (version slot, spans) each, in the order drawn above."""
    token_ids: list[int] = []
    positions: list[int] = []
    write_blocks: list[int] = []
    segments: list[Segment] = []
    prefills: list[Prefill] = []
    logit_rows: list[int] = []
    logit_spans: list[Span] = []
    decode_rows: list[int] = []
    decode_spans: list[Span] = []
    for slot, spans in groups:
        begin = len(token_ids)
        for span in spans:
            row = len(token_ids)
            seq, start, count = span.seq, span.start, span.num_rows
            if count == 1:
                token_ids.append(seq.tokens[start])
                positions.append(start)
                write_blocks.append(seq.blocks[start // block_tokens])
                decode_rows.append(row)
                decode_spans.append(span)
            else:
                token_ids.extend(seq.tokens[start : start + count])
                positions.extend(range(start, start + count))
                write_blocks.extend(
                    seq.blocks[p // block_tokens] for p in range(start, start + count)
                )
                num_blocks = -(-(start + count) // block_tokens)
                prefills.append(Prefill(row, count, start, tuple(seq.blocks[:num_blocks])))
            if span.num_logits:
                first = row + span.logits_start - start
                logit_rows.extend(range(first, first + span.num_logits))
                logit_spans.append(span)
        padding = -(len(token_ids) - begin) % tile_rows
        token_ids.extend([0] * padding)
        positions.extend([0] * padding)
        write_blocks.extend([scrap_block] * padding)
        segments.append(Segment(slot, begin, len(token_ids)))
    decode = None
    if decode_rows:
        decode = pair_blocks(decode_rows, decode_spans, tables, block_tokens)
        if not prefills:
            decode = _spread(decode, decode_rows, len(token_ids))
    return HostBatch(
        np.array(token_ids, np.int64),
        np.array(positions, np.int64),
        np.array(write_blocks, np.int64),
        segments,
        decode,
        prefills,
        np.array(logit_rows, np.int64),
        logit_spans,
    )


def _spread(pairs: DecodePairs, rows: list[int], num_rows: int) -> DecodePairs:
    """The same pairs with one table row for every row of the batch."""
    table = np.zeros((num_rows, pairs.table.shape[1]), np.int64)
    valid = np.zeros(table.shape, np.bool_)
    valid[:, 0] = True
    table[rows], valid[rows] = pairs.table, pairs.valid
    return replace(pairs, rows=None, table=table, valid=valid)


def pair_blocks(
    rows: list[int], spans: list[Span], tables: BlockTables, block_tokens: int
) -> DecodePairs:
    """Arrange the blocks of decode rows so that each is read once, or once per sharer."""
    slots = np.array([span.seq.slot for span in spans])
    contexts = np.array([span.start + 1 for span in spans])
    counts = -(-contexts // block_tokens)
    width = int(counts.max())
    valid = np.arange(width) < counts[:, None]
    blocks_of = tables.table[slots, :width]
    pair_row, pair_index = np.nonzero(valid)
    pair_block = blocks_of[valid]
    length = np.minimum(contexts[pair_row] - pair_index * block_tokens, block_tokens)
    # Rank of a pair among the pairs of its block: 0 for the first row that uses it.
    order = np.argsort(pair_block, kind="stable")
    ordered = pair_block[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    starts = np.flatnonzero(first)
    run = np.cumsum(first) - 1
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - starts[run]
    unique = ordered[starts]
    shares = np.diff(np.r_[starts, len(ordered)])
    by_shares = np.argsort(-shares, kind="stable")
    num_pool = int(unique[-1]) + 1
    if num_pool > 3 * len(unique):
        num_pool = 0  # mostly blocks of others: gathering ours costs less than reading them all
    place = np.empty(len(unique), np.int64)
    place[by_shares] = np.arange(len(unique))
    run_of_pair = np.empty_like(order)
    run_of_pair[order] = run
    place_of_pair = place[run_of_pair]
    if num_pool:
        place_of_pair = np.where(rank == 0, pair_block, place_of_pair)
    owners, sizes = [], []
    for r in range(int(shares.max())):
        mine = rank == r
        size = num_pool if r == 0 and num_pool else int((shares > r).sum())
        owner = np.zeros(size, np.int64)
        owner[place_of_pair[mine]] = np.asarray(rows)[pair_row[mine]]
        owners.append(owner)
        sizes.append(size)
    offsets = np.r_[0, np.cumsum(sizes)]
    where = offsets[rank] + place_of_pair
    lengths = np.ones(int(offsets[-1]), np.int64)
    lengths[where] = length
    table = np.zeros(blocks_of.shape, np.int64)
    table[pair_row, pair_index] = where
    shared = unique[by_shares]
    if num_pool:
        shared = shared[: int((shares > 1).sum())]
    return DecodePairs(np.asarray(rows), num_pool, shared, tuple(owners), lengths, table, valid)
