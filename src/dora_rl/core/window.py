"""The staleness bound: admission and taking by deadline. The proof is in docs/staleness.md.

    s   the step being filled             K   max_staleness
    f   its free places                   B   batch_groups
    S   the last step of the run          d(w) = min(w + K, S), the last step that may train w
    u(<= w)  groups on versions up to w, issued, neither ended nor taken

Invariant, for every version w >= s - K:   u(<= w) <= f + B * (d(w) - s).

Pure arithmetic over the few live versions; nothing here knows groups, instances or time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dora_rl.types import StepIndex, Version

Untaken: TypeAlias = Sequence[tuple[Version, int]]
"""(version, number of untaken groups), ascending by version."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The numbers of the invariant at one moment.

    >>> bound = Bound(filling=5, free=4, max_staleness=2, batch=8, last=100)
    >>> bound.capacity(3), bound.capacity(5)   # due now: the free places; later: two more batches
    (4, 20)
    """

    filling: StepIndex
    free: int
    max_staleness: int
    batch: int
    last: StepIndex

    def capacity(self, version: Version) -> int:
        """f + B * (d(w) - s): how many groups up to `version` can still be trained in time."""
        deadline = min(version + self.max_staleness, self.last)
        return self.free + self.batch * (deadline - self.filling)

    @property
    def oldest(self) -> Version:
        """The oldest version the step being filled may train."""
        return self.filling - self.max_staleness

    def holds(self, untaken: Untaken) -> bool:
        """The invariant itself, and that nothing untaken is already too old."""
        too_old = any(count and version < self.oldest for version, count in untaken)
        left = self._left(untaken)
        return not too_old and all(num >= 0 for version, num in left if version >= self.oldest)

    def may_admit(self, untaken: Untaken, version: Version) -> bool:
        """Would the invariant still hold with one more group on `version`?"""
        total = sum(count for other, count in untaken if other <= version)
        fits = version >= self.oldest and total < self.capacity(version)
        return fits and all(num >= 1 for other, num in self._left(untaken) if other > version)

    def may_take(self, untaken: Untaken, version: Version) -> bool:
        """May a ready group of `version` have a free place, or must older ones come first?"""
        total, oldest = 0, self.oldest
        for other, count in untaken:  # a loop, and left early: this is asked with every event
            if other >= version:
                break
            total += count
            if other >= oldest and total >= self.capacity(other):
                return False
        return self.free >= 1

    def _left(self, untaken: Untaken) -> Iterator[tuple[Version, int]]:
        """For each version: how many groups more, up to it, could still be trained in time."""
        total = 0
        for version, count in untaken:
            total += count
            yield version, self.capacity(version) - total
