"""How many rows a decode pass on a GPU has, and how many passes are launched at once.

Pure. Rows are padded to buckets, each with a graph of its own.

A graph takes about as long to capture as a hundred steps, and a run meets hundreds of buckets, many
of them for a moment only while requests end. So a larger one serves, whose surplus rows are
padding, until that has wasted as much time as a graph of its own would have taken.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

CAPTURE_STEPS = 100  # that a capture takes as long as
FIRST_ROWS = (1, 4, 16, 32, 64, 96, 128)
ROWS_FREE = 64  # up to here rows cost little beside the weights that a version has read for them
BLOCKS_FEW = 16  # contexts up to here are all alike, longer ones are told apart by factors of four
SPLIT_COST = 0.1  # of a pass, for each factor: longer contexts are split into more parts


FED_LAUNCHES = 16  # in a row for which the GPU never waited, before bursts get shorter


class Bucket(NamedTuple):
    """Version slots [first, first + num_versions), `per_version` rows of each, and the most blocks
    that one of their contexts may have."""

    first: int
    num_versions: int
    per_version: int
    blocks_max: int


def bucket_of(count: int, count_max: int) -> int:
    """Rows to pad to: 1, 4, then steps of 16 or an eighth or so of the size, whichever is more."""
    if count <= 4:
        return min(1 if count == 1 else 4, max(count_max, 1))
    step = max(16, 1 << ((count - 1).bit_length() - 3))
    return min(-(-count // step) * step, max(count_max, count))


def blocks_bucket(num_blocks: int, blocks_max: int) -> int:
    bound = BLOCKS_FEW
    while bound < num_blocks:
        bound *= 4
    return min(bound, blocks_max)


def covers(large: Bucket, small: Bucket) -> bool:
    """Whether a pass of the one has room for every row of the other."""
    ends = large.first + large.num_versions >= small.first + small.num_versions
    rows = large.per_version >= small.per_version
    return large.first <= small.first and ends and rows and large.blocks_max >= small.blocks_max


def cost(bucket: Bucket) -> float:
    """The time of a pass, roughly, in a unit of no meaning."""
    share, bound = 1.0, BLOCKS_FEW
    while bound < bucket.blocks_max:
        share, bound = share + SPLIT_COST, bound * 4
    return share * bucket.num_versions * (ROWS_FREE + bucket.per_version)


def first_buckets(versions_max: int, rows_max: int, blocks_max: int) -> list[Bucket]:
    """A few with room for most steps, to be captured before there is work: the one with room for
    all others, then fewest versions first, because a run begins with one."""
    rows = sorted({bucket_of(min(count, rows_max), rows_max) for count in FIRST_ROWS})
    blocks = sorted({min(BLOCKS_FEW, blocks_max), blocks_max})
    versions = range(1, versions_max + 1)
    every = [Bucket(0, v, n, b) for v in versions for b in blocks for n in rows]
    return [every[-1], *every[:-1]]


class Buckets:
    """Which bucket a step runs in. The caller captures what it is given and has not captured."""

    def __init__(self) -> None:
        self._wasted: dict[Bucket, float] = {}  # steps, of the larger ones that served
        self._served: dict[Bucket, Bucket] = {}  # by which one, of so many that were captured:
        self._num_captured = 0

    def choose(self, needed: Bucket, steps: int, captured: Collection[Bucket]) -> Bucket:
        """`needed` itself, or the cheapest captured one with room for it. None is ever dropped."""
        if needed in captured:
            return needed
        if len(captured) != self._num_captured:
            self._served, self._num_captured = {}, len(captured)
        served = self._served.get(needed)
        if served is None:
            larger = (bucket for bucket in captured if covers(bucket, needed))
            served = self._served[needed] = min(larger, key=cost, default=needed)
        wasted = self._wasted.get(needed, 0.0) + steps * (1 - cost(needed) / cost(served))
        self._wasted[needed] = wasted
        return needed if wasted > CAPTURE_STEPS else served


class Bursts:
    """Decode steps launched at once, where a GPU may be faster than its host: twice as many if the
    GPU has waited, one fewer if it has not for a while. A longer burst saves the host work, and
    costs surplus rows where a response ends inside it."""

    def __init__(self, steps_max: int) -> None:
        self._steps_max, self._num_fed = steps_max, 0

    def after(self, steps: int, starved: bool) -> int:
        """The next burst, after one of `steps` at whose launch the GPU had run out of work or not.
        Between 1 and `steps_max`."""
        self._num_fed = 0 if starved else self._num_fed + 1
        if starved:
            return min(self._steps_max, 2 * steps)
        if self._num_fed < FED_LAUNCHES:
            return steps
        self._num_fed = 0
        return max(1, steps - 1)
