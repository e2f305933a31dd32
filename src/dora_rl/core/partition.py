"""How many instances each version gets, in proportion to its requests. Pure arithmetic.

One instance for each version that has any request, then the next instance to the largest
(quota - given). Where versions outnumber instances the oldest come first and the newest waits.
"""

from __future__ import annotations

from collections.abc import Mapping

from dora_rl.types import Version


def shares(demand: Mapping[Version, int], num_instances: int) -> dict[Version, int]:
    """Instances per version with any demand.

    >>> shares({0: 2, 1: 6}, 4)   # LCFT, figure 6
    {0: 1, 1: 3}
    >>> shares({0: 1, 1: 1, 2: 1}, 2)
    {0: 1, 1: 1, 2: 0}
    """
    wanted = {v: n for v, n in sorted(demand.items()) if n > 0}
    if not wanted or num_instances <= len(wanted):
        return {v: int(place < num_instances) for place, v in enumerate(wanted)}
    total = sum(wanted.values())
    quota = {v: num_instances * n / total for v, n in wanted.items()}
    given = {v: max(1, int(q)) for v, q in quota.items()}
    spare = num_instances - sum(given.values())
    while spare > 0:
        version = max(given, key=lambda v: (quota[v] - given[v], -v))
        given[version] += 1
        spare -= 1
    while spare < 0:
        version = min((v for v in given if given[v] > 1), key=lambda v: (quota[v] - given[v], -v))
        given[version] -= 1
        spare += 1
    return given
