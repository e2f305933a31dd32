"""Columns that grow: arrays with room to spare, so that adding rows does not copy what is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Growing:
    """Equally long columns. `table["name"]` is a view of the rows in use; write through it."""

    def __init__(self, **fills: tuple[str, float]) -> None:
        self._fills = fills
        self._columns: dict[str, NDArray[Any]] = {
            name: np.full(1024, fill, dtype) for name, (dtype, fill) in fills.items()
        }
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._columns[name][: self.size]

    def reach(self, size: int) -> None:
        """Have at least so many rows; new ones hold the columns' fill values."""
        if size <= self.size:
            return
        room = len(next(iter(self._columns.values())))
        if size > room:
            more = max(size, 2 * room) - room
            for name, (dtype, fill) in self._fills.items():
                self._columns[name] = np.concatenate(
                    [self._columns[name], np.full(more, fill, dtype)]
                )
        self.size = size

    def extend(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Add rows; every column must be given."""
        assert rows.keys() == self._fills.keys(), f"{sorted(rows)} are not the columns"
        begin = self.size
        self.reach(begin + len(next(iter(rows.values()))))
        for name, values in rows.items():
            self._columns[name][begin : self.size] = values
