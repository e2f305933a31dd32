"""The block ledger balances, shares by content and forgets what it must."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.engine.blocks import BlockPool, block_digests


def test_take_release_and_counts() -> None:
    pool = BlockPool(4, cached_max=4)
    blocks = [pool.take() for _ in range(4)]
    assert blocks == [0, 1, 2, 3]
    assert pool.take() is None
    assert pool.counts() == (0, 4, 0, 4)
    pool.release((2,))
    assert pool.take() == 2


def test_idle_content_is_found_until_evicted() -> None:
    pool = BlockPool(2, cached_max=2)
    first = pool.take()
    assert first is not None
    pool.register(first, 0, b"a")
    pool.release((first,))
    assert pool.counts() == (1, 0, 1, 2)
    assert pool.find(b"a") == first
    pool.take()
    assert pool.take() == first  # the cached block is evicted when nothing is free
    assert pool.find(b"a") is None


def test_retiring_a_version_forgets_its_content() -> None:
    pool = BlockPool(3, cached_max=3)
    for version, key in ((0, b"a"), (1, b"b")):
        block = pool.take()
        assert block is not None
        pool.register(block, version, key)
        pool.release((block,))
    pool.forget_version(0)
    assert pool.find(b"a") is None
    assert pool.find(b"b") is not None
    pool.check()


def test_poisoned_blocks_are_scrubbed_when_nobody_holds_them() -> None:
    pool = BlockPool(2, cached_max=2)
    block = pool.take()
    assert block is not None
    pool.register(block, 0, b"a")
    pool.retain(block)
    pool.poison((block,))
    pool.release((block,))
    assert pool.to_scrub == []
    pool.release((block,))
    assert pool.to_scrub == [block]
    assert pool.counts().cached == 0


def test_digests_cover_version_and_everything_before() -> None:
    base = block_digests(0, (1, 2, 3, 4, 5), 2)
    assert len(base) == 3
    assert block_digests(1, (1, 2, 3, 4, 5), 2)[0] != base[0]
    assert block_digests(0, (9, 2, 3, 4, 5), 2)[2] != base[2]
    assert block_digests(0, (1, 2, 3, 4), 2) == base[:2]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_conservation(actions: list[tuple[int, int]]) -> None:
    pool = BlockPool(6, cached_max=3)
    held: list[int] = []
    for action, argument in actions:
        if action == 0:
            block = pool.take()
            if block is not None:
                held.append(block)
        elif action == 1 and held:
            pool.release((held.pop(argument % len(held)),))
        elif action == 2 and held:
            pool.register(held[argument % len(held)], argument % 2, bytes([argument]))
        elif action == 3:
            block = pool.find(bytes([argument]))
            if block is not None:
                pool.retain(block)
                held.append(block)
        pool.check()
        assert pool.counts().used == len(set(held))
        assert pool.counts().cached <= 3
