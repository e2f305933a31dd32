"""Which documents share a micro-batch: by token count, balanced by attention cost, never padded.

Pure integers, no tensors. Invariant: every document is in exactly one pack, and a pack holds more
than `pack_tokens` tokens only if it is one document that is longer by itself.

A document's cost is linear in its tokens (matrix products) plus quadratic (attention). The ratio
is a property of the model: attention over n tokens costs as much as the linear part of
`n² / quadratic_tokens` tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def document_cost(num_tokens: int, quadratic_tokens: float) -> float:
    """Cost in units of one token's linear work."""
    return num_tokens + num_tokens * num_tokens / quadratic_tokens


def quadratic_tokens(attention_width: int, num_params_layer: int) -> float:
    """The document length at which causal attention costs as much as the layer's matrices.

    Per token and layer: 2·P for the matrices; for causal attention over n tokens 2·n·width (scores
    and values, halved by causality).
    """
    return max(1.0, num_params_layer / attention_width)


def pack_stream(lengths: Sequence[int], pack_tokens: int) -> tuple[list[list[int]], list[int]]:
    """First come, first packed: (full packs, documents left over), as indices in arrival order.

    A pack is closed when the next document would not fit, so what is left over is always less
    than one pack and a stream of unknown length can be cut as it arrives.
    """
    packs: list[list[int]] = []
    open_pack: list[int] = []
    used = 0
    for index, length in enumerate(lengths):
        if open_pack and used + length > pack_tokens:
            packs.append(open_pack)
            open_pack, used = [], 0
        open_pack.append(index)
        used += length
        if used >= pack_tokens:
            packs.append(open_pack)
            open_pack, used = [], 0
    return packs, open_pack


def pack_balanced(
    lengths: Sequence[int], pack_tokens: int, ranks: int, quadratic: float
) -> list[list[int]]:
    """Packs whose number is a multiple of `ranks` (some may be empty), costs as equal as can be.

    Longest first into the cheapest pack with room; the number of packs grows until all fit. The
    packs come back most expensive first, so that packs i·ranks .. i·ranks+ranks-1, which run side
    by side, cost about the same; no round of packs is empty unless there is nothing to pack.
    """
    assert ranks >= 1
    if not lengths:
        return [[] for _ in range(ranks)]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_packs = -(-max(1, -(-sum(lengths) // pack_tokens)) // ranks) * ranks
    while True:
        packs = _fill(lengths, order, pack_tokens, num_packs, quadratic)
        if packs is not None:
            break
        num_packs += ranks
    cost = [sum(document_cost(lengths[i], quadratic) for i in pack) for pack in packs]
    ranked = sorted(range(num_packs), key=lambda p: (-cost[p], p))
    # A document longer than a pack is counted as several packs and fills one.
    num_filled = -(-sum(1 for pack in packs if pack) // ranks) * ranks
    return [sorted(packs[p]) for p in ranked[:num_filled]]


def _fill(
    lengths: Sequence[int], order: list[int], pack_tokens: int, num_packs: int, quadratic: float
) -> list[list[int]] | None:
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    tokens = [0] * num_packs
    heap = [(0.0, p) for p in range(num_packs)]
    for index in order:
        skipped: list[tuple[float, int]] = []
        while heap:
            cost, p = heapq.heappop(heap)
            if not packs[p] or tokens[p] + lengths[index] <= pack_tokens:
                break
            skipped.append((cost, p))
        else:
            return None
        packs[p].append(index)
        tokens[p] += lengths[index]
        heapq.heappush(heap, (cost + document_cost(lengths[index], quadratic), p))
        for item in skipped:
            heapq.heappush(heap, item)
    return packs
