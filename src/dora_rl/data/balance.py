"""Split samples over ranks so that each gets about the same number of tokens.

Pure arithmetic. Invariant: every sample goes to exactly one rank, the result depends on the
arguments alone, and counts differ by at most one where `equal_counts` is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


def balance(
    num_tokens: Sequence[int], num_ranks: int, *, equal_counts: bool = False
) -> list[list[int]]:
    """Positions of the samples of each rank: the longest first, each to the lightest rank.

    The fullest rank gets at most 4/3 of the best possible load.

    >>> balance([9, 5, 4, 1], 2)
    [[0, 3], [1, 2]]
    """
    assert num_ranks > 0
    count_max = -(-len(num_tokens) // num_ranks) if equal_counts else len(num_tokens)
    num_full_max = len(num_tokens) % num_ranks or num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, 0, rank) for rank in range(num_ranks)]
    heapify(loads)
    num_full = 0
    for sample in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        load, _, rank = heappop(loads)
        ranks[rank].append(sample)
        count = len(ranks[rank])
        if count < count_max:
            heappush(loads, (load + num_tokens[sample], count, rank))
        elif equal_counts:
            num_full += 1
            if num_full == num_full_max:
                # The remaining samples fill the other ranks up to one sample less.
                count_max -= 1
                loads = [entry for entry in loads if len(ranks[entry[2]]) < count_max]
                heapify(loads)
    return [sorted(rank) for rank in ranks]
