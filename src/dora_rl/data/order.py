"""In which order prompts come: pure arithmetic from (seed, index) to (source, epoch, row).

No position or permutation is stored. Every epoch of a source visits each of its rows exactly once,
whatever the mixing weights, and any index can be asked for directly.

    index ──interleave──▶ (source, k-th draw of it) ──divide──▶ (epoch, offset) ──permute──▶ row
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, isqrt

# The pattern of sources repeats after at most this many prompts: weights are kept to 0.1 %.
PATTERN_LENGTH_MAX = 1000
NUM_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Interleave:
    """A repeating pattern of sources, as even as the weights allow.

    >>> [Interleave.of((2.0, 1.0)).place(i) for i in range(4)]
    [(0, 0), (1, 0), (0, 1), (0, 2)]
    """

    sources: tuple[int, ...]
    ranks: tuple[int, ...]
    quotas: tuple[int, ...]

    @staticmethod
    def of(weights: Sequence[float]) -> Interleave:
        quotas = _quotas(weights)
        # The k-th of q draws of a source belongs at (k + 1/2) / q of the pattern.
        draws = sorted(
            ((k + 0.5) / quota, source, k)
            for source, quota in enumerate(quotas)
            for k in range(quota)
        )
        return Interleave(tuple(d[1] for d in draws), tuple(d[2] for d in draws), quotas)

    def place(self, index: int) -> tuple[int, int]:
        """Which source the index draws from, and how many draws of that source came before."""
        block, slot = divmod(index, len(self.sources))
        source = self.sources[slot]
        return source, block * self.quotas[source] + self.ranks[slot]


def _quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Draws of each source in one pattern, by largest remainder, each at least one."""
    assert weights and all(weight > 0 for weight in weights), f"weights {weights}"
    if len(set(weights)) == 1:
        return (1,) * len(weights)
    exact = [weight / sum(weights) * PATTERN_LENGTH_MAX for weight in weights]
    quotas = [max(1, int(share)) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: quotas[i] - exact[i])
    for i in order[: max(0, PATTERN_LENGTH_MAX - sum(quotas))]:
        quotas[i] += 1
    return tuple(quota // gcd(*quotas) for quota in quotas)


def epoch_key(seed: int, source: int, epoch: int | str) -> bytes:
    return hashlib.blake2b(f"prompts/{seed}/{source}/{epoch}".encode(), digest_size=16).digest()


def permute(index: int, size: int, key: bytes) -> int:
    """The place of `index` in a pseudo-random permutation of range(size), with no memory.

    A Feistel network on pairs (left, right) of a rectangle that just covers the range. The few
    results that fall outside it are put through again, which keeps the map one to one.
    """
    assert 0 <= index < size, f"index {index} of {size}"
    width = isqrt(size - 1) + 1
    height = -(-size // width)
    while True:
        right, left = divmod(index, width)
        for turn in range(NUM_ROUNDS):
            left = (left + _mix(key, 2 * turn, right)) % width
            right = (right + _mix(key, 2 * turn + 1, left)) % height
        if (index := right * width + left) < size:
            return index


def _mix(key: bytes, turn: int, value: int) -> int:
    data = value.to_bytes(8, "little") + turn.to_bytes(1, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")
