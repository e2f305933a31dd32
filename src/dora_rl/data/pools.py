"""Pools of a curriculum: which row is the k-th prompt of a pool (`data.curriculum`).

Each source is divided into pools of the same size: under `pools` by difficulty, from the easiest
rows to the hardest, under `rows` into as many as it has rows. An endless source is divided block by
block. Never keeps a position: the row is a function of (source, seed, pool, k). Invariants: each
epoch of a pool gives every row of it once; no row is in two pools.

    index ──divide──▶ (draw, pool) ──divide──▶ (draw, part, source) ──place──▶ row
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isfinite

from dora_rl.config import DataConfig
from dora_rl.data.order import epoch_key, permute
from dora_rl.data.rows import OpenSource
from dora_rl.types import UserError

POOL_ROWS = 32  # of one block of an endless source


class Pools:
    """Those of source `number` of the configuration."""

    def __init__(self, config: DataConfig, source: OpenSource, number: int) -> None:
        self._config, self._source, self._number = config, source, number
        self.num_pools = num_pools(config, source)
        self._block = source.num_kept or POOL_ROWS * self.num_pools  # rows
        if self.num_pools > self._block:
            raise UserError(
                f"data.curriculum_pools = {self.num_pools}: {source.config.path} has "
                f"{self._block} rows; give fewer pools"
            )
        # Easy and hard pools are in different blocks of an endless source.
        self._ranked = lru_cache(2 * self.num_pools if source.num_kept is None else 1)(self._rank)

    def place(self, pool: int, draw: int) -> int:
        """The place among the kept rows of a pool's draw."""
        shuffle = self._config.shuffle and self._source.num_kept is not None
        if self._config.curriculum == "rows":
            return self._permute(pool, self._block, "rows") if shuffle else pool
        low, high = self._cut(pool), self._cut(pool + 1)
        epoch, offset = divmod(draw, high - low)
        if shuffle:
            offset = self._permute(offset, high - low, f"{pool}/{epoch}")
        return self._ranked(epoch if self._source.num_kept is None else 0)[low + offset]

    def _cut(self, pool: int) -> int:
        return self._block * pool // self.num_pools

    def _permute(self, index: int, size: int, label: str) -> int:
        return permute(index, size, epoch_key(self._config.seed, self._number, label))

    def _rank(self, block: int) -> Sequence[int]:
        """The rows of a block, pool after pool; those of a pool as they are stored."""
        rows = range(block * self._block, (block + 1) * self._block)
        if self.num_pools == 1:
            return rows
        ranked = sorted(rows, key=lambda row: (self._difficulty(row), row))
        cuts = [(self._cut(pool), self._cut(pool + 1)) for pool in range(self.num_pools)]
        return [row for low, high in cuts for row in sorted(ranked[low:high])]

    def _difficulty(self, place: int) -> float:
        rows, row = self._source.rows, self._source.row_number(place)
        column = self._config.curriculum_column
        value = rows.row(row).get(column)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise UserError(
                f"{rows.where(row)}: {column!r} is {value!r}, not a number; set "
                "data.curriculum_column to the column that says how hard a row is, or "
                'data.curriculum = "rows"'
            )
        return value


def num_pools(config: DataConfig, source: OpenSource) -> int:
    """Of each source; under `rows` there is only one."""
    if config.curriculum != "rows":
        return config.curriculum_pools
    if len(config.train) > 1 or source.num_kept is None:
        raise UserError('data.curriculum = "rows" is for one source that ends; give "pools"')
    return source.num_kept
