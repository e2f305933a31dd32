"""Which bucket a decode pass on a GPU runs in; nothing here needs one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.engine.cuda.buckets import (
    CAPTURE_STEPS,
    Bucket,
    Buckets,
    bucket_of,
    cost,
    covers,
    first_buckets,
)

BUCKETS = st.builds(
    Bucket,
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from([1, 4, 16, 32, 64]),
    st.sampled_from([16, 64]),
)


@given(st.lists(st.tuples(BUCKETS, st.integers(1, 80)), max_size=60))
def test_a_step_always_fits_and_larger_graphs_waste_no_more_than_a_capture_takes(
    steps: list[tuple[Bucket, int]],
) -> None:
    buckets, captured, wasted = Buckets(), set[Bucket](), dict[Bucket, float]()
    for needed, repeat in steps:
        chosen = buckets.choose(needed, repeat, captured)
        assert covers(chosen, needed)
        if chosen == needed:
            captured.add(needed)
        else:
            assert chosen in captured, "a bucket was captured for somebody else"
            assert needed not in captured
            assert cost(chosen) >= cost(needed)
            share = 1 - cost(needed) / cost(chosen)
            wasted[needed] = wasted.get(needed, 0.0) + share * repeat
    assert all(num <= CAPTURE_STEPS for num in wasted.values())


def test_a_passing_bucket_is_not_captured_and_a_lasting_one_is() -> None:
    buckets, captured = Buckets(), set[Bucket]()

    def choose(needed: Bucket, steps: int) -> Bucket:
        chosen = buckets.choose(needed, steps, captured)
        captured.add(chosen)
        return chosen

    large, half, wide = Bucket(0, 1, 160, 16), Bucket(0, 1, 64, 16), Bucket(0, 2, 64, 16)
    assert choose(large, 1) == large
    assert choose(wide, 1) == wide  # nothing has room for two versions
    steps = round(CAPTURE_STEPS / (1 - cost(half) / cost(large)))
    assert [choose(half, steps // 8) for _ in range(8)] == [large] * 8
    assert choose(half, steps // 8) == half
    assert choose(Bucket(0, 1, 48, 16), 1) == half, "of those with room, the cheapest"
    assert choose(Bucket(0, 1, 48, 64), 1).blocks_max == 64


@given(st.integers(1, 4), st.integers(1, 600), st.integers(1, 700))
def test_the_first_buckets_are_few_and_serve_most_steps(
    versions: int, rows_max: int, blocks_max: int
) -> None:
    first = first_buckets(versions, rows_max, blocks_max)
    assert len(first) == len(set(first)) <= 14 * versions
    assert all(b.per_version <= max(rows_max, 1) and b.blocks_max <= blocks_max for b in first)
    buckets = Buckets()
    for count in range(1, min(rows_max, 128) + 1):
        needed = Bucket(versions - 1, 1, bucket_of(count, rows_max), blocks_max)
        assert buckets.choose(needed, 1, first) in first


def test_rows_are_padded_by_an_eighth_or_so() -> None:
    assert [bucket_of(n, 512) for n in (1, 2, 5, 17, 64, 65, 129, 500)] == [
        *(1, 4, 16, 32, 64, 80, 160, 512)
    ]
    assert bucket_of(30, 24) == 30
