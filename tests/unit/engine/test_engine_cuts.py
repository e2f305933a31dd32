"""How decode steps are cut into programs of a GPU; the kernels themselves are in tests/gpu."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.engine.cuda.kernels.cuts import (
    CUT_K,
    LONG_BLOCKS,
    RING,
    RINGS,
    ROWS_OF,
    SPLITS_MAX,
    Cut,
    Tiles,
    choose_cut,
    choose_ring,
    choose_splits,
)

PROCESSORS = 132
SHARED_BYTES = 227 * 1024  # of a processor of a Hopper, for programs


@given(
    rows=st.integers(1, 2048), kv_heads=st.sampled_from([1, 2, 4, 8, 16]), wave=st.integers(1, 6)
)
def test_splits_make_one_wave(rows: int, kv_heads: int, wave: int) -> None:
    blocks_max = 10
    number = choose_splits(rows, kv_heads, PROCESSORS, blocks_max, wave).number
    assert number == 1 or number * rows * kv_heads <= wave * PROCESSORS
    more = (number + 1) * rows * kv_heads
    assert number in (blocks_max, SPLITS_MAX) or more > wave * PROCESSORS


@given(
    rows=st.integers(1, 512),
    wave=st.integers(0, 6),
    blocks_max=st.integers(1, 400),
    data=st.data(),
)
def test_splits_cover_every_context(rows: int, wave: int, blocks_max: int, data) -> None:
    """With the kernels' rule for the blocks of a split, and no program has more than a long one
    unless there are no more splits."""
    number, least = choose_splits(rows, 8, PROCESSORS, blocks_max, wave)
    blocks = data.draw(st.integers(1, blocks_max))
    each = max(-(-blocks // number), least)
    assert number * each >= blocks
    assert each <= LONG_BLOCKS or number == SPLITS_MAX


@given(num_programs=st.integers(1, 10_000))
def test_rings_fill_a_processor_and_fit(num_programs: int) -> None:
    ring = choose_ring(num_programs, PROCESSORS)
    each = -(-num_programs // PROCESSORS)
    at_once = SHARED_BYTES // (ring.num_bytes + 1024)
    assert at_once >= min(each, 6)
    if ring is RING:
        assert each > max(RINGS)


def test_which_products_are_cut() -> None:
    """Those whose programs run all at once and leave few processors idle."""

    def cut(rows: int, n: int, k: int, *, gate: bool = False, versions: int = 1) -> Cut | None:
        return choose_cut(rows, versions, n, k, PROCESSORS, gate)

    assert cut(256, 12_288, 2048, gate=True) == (Tiles.SHARED, 1)
    assert cut(256, 2048, 6144) == (Tiles.HALF, 4)
    assert cut(129, 4096, 2048) == (Tiles.HALF, 2)
    assert cut(128, 4096, 2048) is None
    assert cut(257, 4096, 2048) is None
    assert cut(256, 24_576, 4096, gate=True) is None
    assert cut(256, 2048, 2048, versions=2) == (Tiles.HALF, 2)
    assert cut(256, 4096, 2048, versions=3) == (Tiles.WHOLE, 1)
    assert cut(256, 4096, 2048, versions=5) is None
    assert cut(256, 4096 + 48, 2048) is None
    assert cut(256, 4096, 2048 + 32) is None


@pytest.mark.parametrize("gate", [False, True])
@given(
    rows=st.integers(1, 300),
    versions=st.integers(1, 4),
    n=st.integers(1, 512).map(lambda x: 32 * x),
    k=st.integers(1, 256).map(lambda x: 32 * x),
)
def test_a_cut_is_what_the_kernel_asks_for(gate: bool, rows: int, versions: int, n: int, k: int):
    cut = choose_cut(rows, versions, n, k, PROCESSORS, gate)
    if cut is None:
        return
    programs = versions * n // ROWS_OF[cut.tiles] * cut.splits
    assert n % (2 * ROWS_OF[cut.tiles]) == 0
    assert k % (CUT_K * cut.splits) == 0
    assert PROCESSORS * 2 / 3 <= programs <= PROCESSORS
    assert cut.splits == 1 or not gate
