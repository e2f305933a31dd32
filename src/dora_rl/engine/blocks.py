"""The ledger of KV blocks: who holds which, and which idle ones can be found again by content.

Pure bookkeeping: it never touches a tensor. Invariant, after every call: each block is exactly one
of free, used (reference count above zero) or cached (idle, but its content has a key), and
free + used + cached = num_blocks.

    free  --take-->  used  --release, has key-->  cached  --evict-->  free
                       \\--release, no key----------------------------^
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from dora_rl.types import Version


class BlockCounts(NamedTuple):
    """`free + used + cached == total`, always."""

    free: int
    used: int
    cached: int
    total: int


def block_digests(
    version: Version, token_ids: Sequence[int], block_tokens: int
) -> tuple[bytes, ...]:
    """One key per block of a prompt; each covers the version and every token up to its end.

    The last key covers a partial block when the length is no multiple of `block_tokens`.
    """
    digest = b"v%d" % version
    keys: list[bytes] = []
    for start in range(0, len(token_ids), block_tokens):
        chunk = array("q", token_ids[start : start + block_tokens]).tobytes()
        digest = hashlib.blake2b(digest + chunk, digest_size=16).digest()
        keys.append(digest)
    return tuple(keys)


class BlockPool:
    """Reference-counted blocks with an index of reusable content."""

    def __init__(self, num_blocks: int, cached_max: int) -> None:
        assert num_blocks > 0
        self.num_blocks, self.cached_max = num_blocks, cached_max
        self.refs = [0] * num_blocks
        # The lowest free number is taken first, so that blocks in use stay close together: the CPU
        # attention reads the used range of the pool in one pass.
        self._free = list(range(num_blocks))  # a heap, since it is in order
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, tuple[Version, bytes]] = {}
        self._poisoned: set[int] = set()
        self.to_scrub: list[int] = []  # freed blocks whose content must be zeroed before reuse

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: the free ones and the idle cached ones."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free, self.num_blocks - free - cached, cached, self.num_blocks)

    def take(self) -> int | None:
        """A block with one reference, evicting the idlest cached one if none is free."""
        if not self._free and not self._evict():
            return None
        block = heappop(self._free)
        self.refs[block] = 1
        return block

    def retain(self, block: int) -> None:
        if self.refs[block] == 0:
            del self._cached[block]
        self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each; give them deepest first, so that chains lose their tails."""
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} released twice"
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            if block in self._poisoned:
                self._poisoned.discard(block)
                self.to_scrub.append(block)
            if block in self._key_of:
                self._cached[block] = None
                if len(self._cached) > self.cached_max:
                    self._evict()
            else:
                heappush(self._free, block)

    def find(self, key: bytes) -> int | None:
        return self._by_key.get(key)

    def register(self, block: int, version: Version, key: bytes) -> None:
        """Make the content of a used block findable; the first block with that content wins."""
        assert self.refs[block] > 0
        if key in self._by_key or block in self._key_of:
            return
        self._by_key[key] = block
        self._key_of[block] = (version, key)

    def forget_block(self, block: int) -> None:
        """The content of a used block is no longer trusted (or will change)."""
        if entry := self._key_of.pop(block, None):
            del self._by_key[entry[1]]

    def poison(self, blocks: Iterable[int]) -> None:
        """Used blocks that may hold NaN: never shared again, zeroed once nobody holds them."""
        for block in blocks:
            assert self.refs[block] > 0
            self.forget_block(block)
            self._poisoned.add(block)

    def forget_version(self, version: Version) -> None:
        """A retired version leaves nothing behind that a later one could find."""
        for block in [block for block, (owner, _) in self._key_of.items() if owner == version]:
            self.forget_block(block)
            if block in self._cached:
                del self._cached[block]
                heappush(self._free, block)

    def check(self) -> None:
        """Raise if the books do not balance. Cheap enough for tests after every step."""
        used = sum(refs > 0 for refs in self.refs)
        assert len(self._free) + used + len(self._cached) == self.num_blocks
        assert not set(self._free) & set(self._cached)
        assert all(self.refs[block] == 0 for block in (*self._free, *self._cached))
        assert all(self._by_key[key] == block for block, (_, key) in self._key_of.items())

    def _evict(self) -> bool:
        if not self._cached:
            return False
        block, _ = self._cached.popitem(last=False)
        self.forget_block(block)
        heappush(self._free, block)
        return True
