"""Which prompt comes next, by what the rewards said of prompts like it.

The data are divided into pools (`data/pools.py`): sources, parts of a source that are about as
hard, or single rows. Place i of the prompt stream belongs to pool i mod n and is the (i div n)-th
prompt of it, so that the core needs to know nothing of rows. A group tells something if its rewards
differ; one whose samples were all right or all wrong teaches nothing. Of each pool the share of
recent groups that told something is kept.

    pools are visited in turn     0 1 2 3 0 1 2 3 0 …
    a visit gives credit          that share, at least `pool_share_min`, times the source's weight
    credit of 1                   pays for the pool's next prompt; otherwise the visit goes on

Promises: the prompts of a pool come in order, none is left out and none comes twice; a pool waits
for at most `wait_max` prompts of all pools; what is decided follows from the events alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from dora_rl.core.params import Params


@dataclass(slots=True)
class Pool:
    """`told`: of its recent groups, the share whose rewards differed."""

    issued: int = 0
    told: float = 1.0
    credit: float = 0.0


@dataclass(slots=True)
class Curriculum:
    """Pools that were visited, and the one that is visited next."""

    next_pool: int = 0
    pools: dict[int, Pool] = field(default_factory=dict[int, Pool])


def draw(curriculum: Curriculum, params: Params) -> int:
    """The next prompt's place in the stream. Where all pools have little credit, a limited number
    is passed over: one event must not take long."""
    number = _visit(curriculum, params)
    for _ in range(ceil(2 / least_credit(params))):
        if curriculum.pools[number].credit >= 1:
            break
        number = _visit(curriculum, params)
    pool = curriculum.pools[number]
    pool.credit = max(0.0, pool.credit - 1)
    pool.issued += 1
    return (pool.issued - 1) * params.pools + number


def _visit(curriculum: Curriculum, params: Params) -> int:
    """Give the next pool its credit."""
    number = curriculum.next_pool
    pool = curriculum.pools.setdefault(number, Pool())
    curriculum.next_pool = (number + 1) % params.pools
    pool.credit += weight(params, number) * max(params.pool_share_min, pool.told)
    return number


def note(curriculum: Curriculum, params: Params, prompt: int, *, told: bool) -> None:
    """All rewards of a group of this prompt are there; `told`: they differ."""
    pool = curriculum.pools[prompt % params.pools]
    pool.told += (told - pool.told) / params.pool_recent


def wait_max(params: Params) -> int:
    """So many prompts come at most between two of the same pool: in so many rounds its credit is
    there, and a round gives each other pool one prompt."""
    return (ceil(1 / least_credit(params)) + 1) * params.pools


def weight(params: Params, pool: int) -> float:
    """Of the pool's source. Pools of the sources take turns."""
    weights = params.pool_weights
    return weights[pool % len(weights)] if weights else 1.0


def least_credit(params: Params) -> float:
    """What a visit gives at least."""
    return params.pool_share_min * min(params.pool_weights, default=1.0)
