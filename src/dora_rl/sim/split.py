"""How many devices generate and how many train: the search for a split.

Throughput has one peak over the split (too few generate, or too few train), and the share of a
step in which only rollout works falls as devices move to rollout. So both the best split and the
one with a given rollout-only share are found by narrowing a coarse grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dora_rl.sim.flows import Flow, Job
from dora_rl.sim.presets import Preset
from dora_rl.sim.run import ModeResult

_GRID = 5
_CHOICES_MAX = 32


def splits_of(preset: Preset) -> list[int]:
    """Numbers of rollout devices worth trying: whole instances, at most about 32 of them."""
    tensor = preset.tensor_parallel
    every = list(range(tensor, preset.num_devices - tensor + 1, tensor))
    stride = -(-len(every) // _CHOICES_MAX)
    return every[stride - 1 :: stride]


def search_split(
    choices: Sequence[int], job_of: Callable[[int], Job], share: float | None = None
) -> Flow[dict[int, ModeResult]]:
    """Try splits until the best, and the one nearest to `share`, has no untried neighbour."""
    tried: dict[int, ModeResult] = {}
    places = _spread(len(choices))
    while places:
        results = yield [job_of(choices[place]) for place in places]
        tried.update(zip(places, results, strict=True))
        wanted = _around_best(tried, len(choices))
        if share is not None:
            wanted |= _around_share(tried, len(choices), share)
        places = sorted(wanted - set(tried))
    return {choices[place]: tried[place] for place in sorted(tried)}


def _spread(count: int) -> list[int]:
    if count <= _GRID + 1:
        return list(range(count))
    return sorted({(2 * i + 1) * count // (2 * _GRID) for i in range(_GRID)})


def _around_best(tried: dict[int, ModeResult], count: int) -> set[int]:
    """Midpoints of the gaps on both sides of the best place so far."""
    best = max(tried, key=lambda place: (tried[place].tokens_per_s, -place))
    below = max((place for place in tried if place < best), default=-1)
    above = min((place for place in tried if place > best), default=count)
    return _middle(below, best) | _middle(best, above)


def _around_share(tried: dict[int, ModeResult], count: int, share: float) -> set[int]:
    """The midpoint of the gap in which the rollout-only share passes `share`."""
    more = [place for place in tried if tried[place].rollout_only_share >= share]
    below = max(more, default=-1)
    above = min((place for place in tried if place > below), default=count)
    return _middle(below, above)


def _middle(low: int, high: int) -> set[int]:
    return {(low + high) // 2} if high - low > 1 else set()


def best_of(tried: dict[int, ModeResult], num: int = 1) -> list[int]:
    """The splits with the highest throughput, best first; of equals the one that trains more."""
    return sorted(tried, key=lambda split: (-tried[split].tokens_per_s, split))[:num]


def nearest_to(tried: dict[int, ModeResult], share: float, num: int = 1) -> list[int]:
    """The splits whose rollout-only share is nearest to `share`, nearest first."""
    return sorted(tried, key=lambda s: (abs(tried[s].rollout_only_share - share), s))[:num]
