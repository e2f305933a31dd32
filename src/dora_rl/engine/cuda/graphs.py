"""CUDA graphs of the decode pass, one per (version slots, rows per version) bucket.

A graph is captured the first time its bucket is needed. Its only input that the host writes is the
list of request slots of its rows, and only when that list changed. Without graphs the same pass
runs eagerly, which is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dora_rl.engine.cuda.slots import DeviceSlots
from dora_rl.engine.plan import Span

Pass = Callable[[int, int, int, Tensor], tuple[Tensor, Tensor]]


def bucket_of(count: int, count_max: int) -> int:
    """Rows to pad to: powers of two up to 16, then steps of an eighth or so of the size."""
    if count <= 16:
        return min(1 << (count - 1).bit_length(), max(count_max, 1))
    step = max(8, 1 << ((count - 1).bit_length() - 3))
    return min(-(-count // step) * step, max(count_max, count))


@dataclass(slots=True)
class Captured:
    """A graph and the static tensors around it."""

    slots: Tensor
    logits: Tensor
    positions: Tensor
    graph: torch.cuda.CUDAGraph | None
    rows: list[int]
    index: Tensor | None = None
    num_rows: int = -1


class DecodeGraphs:
    """Runs the decode pass of any mix of versions through the right graph."""

    def __init__(self, decode: Pass, rows_max: int, device: str, enabled: bool) -> None:
        self._pass, self._rows_max = decode, rows_max
        self._device, self._enabled = device, enabled
        self._captured: dict[tuple[int, int, int], Captured] = {}
        self._pool = None

    def run(
        self, groups: Mapping[int, Sequence[Span]], state: DeviceSlots
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | slice]:
        """Logits, slots and positions of all rows, and where the real rows stand, in order of
        version slot."""
        first, last = min(groups), max(groups)
        num_versions = last - first + 1
        per_version = bucket_of(max(len(spans) for spans in groups.values()), self._rows_max)
        rows = [state.num_slots] * (num_versions * per_version)
        for slot, spans in groups.items():
            start = (slot - first) * per_version
            rows[start : start + len(spans)] = [span.seq.slot for span in spans]
        index = None
        if num_versions > 1:
            index = [
                (slot - first) * per_version + i
                for slot in sorted(groups)
                for i in range(len(groups[slot]))
            ]
        num_rows = sum(len(spans) for spans in groups.values())
        if not self._enabled:
            slots = state.upload(rows, torch.int64)
            logits, positions = self._pass(first, num_versions, per_version, slots)
            where = slice(num_rows) if index is None else state.upload(index, torch.int64)
            return logits, slots, positions, where
        captured = self._get(first, num_versions, per_version, state)
        if captured.rows != rows:
            captured.slots.copy_(state.upload(rows, torch.int64))
            captured.rows = rows
            captured.index = None if index is None else state.upload(index, torch.int64)
        assert captured.graph is not None
        captured.graph.replay()
        where = captured.index if captured.index is not None else slice(num_rows)
        return captured.logits, captured.slots, captured.positions, where

    def _get(self, first: int, num_versions: int, per_version: int, state: DeviceSlots) -> Captured:
        key = (first, num_versions, per_version)
        if key not in self._captured:
            self._captured[key] = self._capture(first, num_versions, per_version, state)
        return self._captured[key]

    def _capture(
        self, first: int, num_versions: int, per_version: int, state: DeviceSlots
    ) -> Captured:
        """Two eager runs on padding rows compile the kernels; the third is recorded."""
        count = num_versions * per_version
        rows = [state.num_slots] * count
        slots = torch.full((count,), state.num_slots, dtype=torch.int64, device=self._device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._pass(first, num_versions, per_version, slots)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, positions = self._pass(first, num_versions, per_version, slots)
        self._pool = self._pool or graph.pool()
        return Captured(slots, logits, positions, graph, rows)
