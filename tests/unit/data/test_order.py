"""The order of prompts: exact epochs, exact shares, any index directly."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.data.order import PATTERN_LENGTH_MAX, Interleave, epoch_key, permute


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**40))
def test_a_permutation_visits_every_place_once(size: int, seed: int) -> None:
    key = epoch_key(seed, 0, 0)
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_permutations_differ_between_epochs_and_look_random() -> None:
    size = 1000
    one = [permute(i, size, epoch_key(0, 0, 0)) for i in range(size)]
    two = [permute(i, size, epoch_key(0, 0, 1)) for i in range(size)]
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 10
    assert sum(abs(a - b) < 10 for a, b in pairwise(one)) < 50
    first_half = sum(value < size // 2 for value in one[: size // 2])
    assert 200 < first_half < 300


def test_large_sources_need_no_memory() -> None:
    size = 10**12
    assert 0 <= permute(10**12 - 1, size, epoch_key(1, 0, 0)) < size


@settings(max_examples=80, deadline=None)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_every_source_is_drawn_in_order_and_in_its_share(weights: list[float]) -> None:
    interleave = Interleave.of(weights)
    num_draws = 2 * len(interleave.sources)
    places = [interleave.place(i) for i in range(num_draws)]
    for source in range(len(weights)):
        draws = [draw for drawn, draw in places if drawn == source]
        assert draws == list(range(len(draws)))
    counts = Counter(source for source, _ in places)
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        slack = (len(weights) + 1) / PATTERN_LENGTH_MAX
        assert abs(counts[source] / num_draws - share) <= slack


def test_the_mix_is_even_at_every_length() -> None:
    interleave = Interleave.of((3.0, 1.0))
    first = [interleave.place(i)[0] for i in range(40)]
    for length in range(4, 40):
        assert abs(first[:length].count(1) - length / 4) <= 1
