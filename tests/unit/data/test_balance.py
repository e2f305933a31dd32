"""Token balance over ranks: everything once, and close to the best possible."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.data.balance import balance

loads = st.lists(st.integers(0, 1000), max_size=60)


@settings(max_examples=150, deadline=None)
@given(tokens=loads, num_ranks=st.integers(1, 7), equal=st.booleans())
def test_every_sample_goes_to_one_rank(tokens: list[int], num_ranks: int, equal: bool) -> None:
    ranks = balance(tokens, num_ranks, equal_counts=equal)
    assert len(ranks) == num_ranks
    assert sorted(i for rank in ranks for i in rank) == list(range(len(tokens)))
    if equal:
        counts = [len(rank) for rank in ranks]
        assert max(counts) - min(counts) <= 1


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(1, 50), min_size=1, max_size=7), num_ranks=st.integers(1, 3))
def test_the_fullest_rank_is_near_the_best_possible(tokens: list[int], num_ranks: int) -> None:
    def fullest(assignment: tuple[int, ...]) -> int:
        return max(
            sum(t for t, a in zip(tokens, assignment, strict=True) if a == rank)
            for rank in range(num_ranks)
        )

    best = min(map(fullest, product(range(num_ranks), repeat=len(tokens))))
    worst = max(sum(tokens[i] for i in rank) for rank in balance(tokens, num_ranks))
    assert 3 * worst <= 4 * best
