"""CUDA graphs of the decode pass, one per bucket of version slots, rows and context lengths.

A graph is captured when larger ones have served its bucket for long enough, or none is there
(`buckets.Buckets`), as long as there is memory for it. Its only input that the host writes is the
list of request slots of its rows, and only when that list changed. Without graphs the same pass
runs eagerly, which is the oracle.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dora_rl.engine.cuda.buckets import Bucket, Buckets, blocks_bucket, bucket_of, cost, covers
from dora_rl.engine.cuda.slots import DeviceSlots
from dora_rl.engine.plan import Span

T = TypeVar("T")


@dataclass(slots=True)
class Launched(Generic[T]):
    """A pass over [version, row] rows flattened, `per_version` rows each, and what it gives;
    `begun` passes came before its first repetition (`DeviceSlots.begin`)."""

    slots: Tensor
    result: T
    first: int
    per_version: int
    begun: int = 0

    def rows_of(self, slot: int, count: int) -> range:
        """Where one version's first `count` rows are."""
        start = (slot - self.first) * self.per_version
        return range(start, start + count)


class Captures:
    """Where graphs are captured: a stream and a pool of memory. Kinds of passes may share them that
    leave what they give in memory of their own."""

    def __init__(self, device: str, enabled: bool) -> None:
        # One of its own for good, made at the start: streams made later come from a small pool, and
        # one that a thread loads on must not be the one that is captured.
        self.stream = torch.cuda.Stream(device) if enabled else None
        self.pool: Any = None  # its number, once there is one
        self.is_full = False  # there was no memory for another graph


class DecodeGraphs(Generic[T]):
    """Runs a decode pass of any mix of versions through the right graph."""

    def __init__(
        self,
        decode: Callable[[Bucket, Tensor], T],
        rows_max: int,
        block_tokens: int,
        device: str,
        enabled: bool,
        captures: Captures | None = None,
    ) -> None:
        self._pass, self._rows_max, self._block_tokens = decode, rows_max, block_tokens
        self._device, self._enabled = device, enabled
        self._buckets = Buckets()
        self._where = captures or Captures(device, enabled)
        self._captured: dict[Bucket, tuple[torch.cuda.CUDAGraph, Launched[T]]] = {}
        self._listed: dict[Bucket, list[int]] = {}

    def run(
        self,
        groups: Mapping[int, Sequence[Span]],
        state: DeviceSlots,
        repeat: int = 1,
        reach: int = 0,
    ) -> Launched[T]:
        """Launch the pass `repeat` times, a burst; between two of them the device needs nothing.
        It comes as many as `reach` positions on, if that is not one in each."""
        first, last = min(groups), max(groups)
        per_version = bucket_of(max(len(spans) for spans in groups.values()), self._rows_max)
        context = max(span.start for spans in groups.values() for span in spans)
        context += reach or repeat
        num_blocks = -(-context // self._block_tokens)
        blocks_max = blocks_bucket(num_blocks, state.table.shape[1])
        key = Bucket(first, last - first + 1, per_version, blocks_max)
        if self._enabled:
            key = self._with_graph(self._buckets.choose(key, repeat, self._captured), key, state)
        rows = [state.num_slots] * (key.num_versions * key.per_version)
        for slot, spans in groups.items():
            start = (slot - key.first) * key.per_version
            rows[start : start + len(spans)] = [span.seq.slot for span in spans]
        if key not in self._captured:
            slots = state.upload(rows, torch.int64)
            begun = state.begin(repeat)
            results = [self._pass(key, slots) for _ in range(repeat)]
            return Launched(slots, results[-1], key.first, key.per_version, begun)
        graph, launched = self._captured[key]
        if self._listed.get(key) != rows:
            launched.slots.copy_(state.upload(rows, torch.int64))
            self._listed[key] = rows
        launched.begun = state.begin(repeat)
        for _ in range(repeat):
            graph.replay()
        return launched

    def _with_graph(self, chosen: Bucket, needed: Bucket, state: DeviceSlots) -> Bucket:
        """A bucket that has a graph. Where memory is short none is captured any more: the cheapest
        one that is there serves, or the pass runs without."""
        if not self._where.is_full:
            try:
                self.capture(chosen, state)
                return chosen
            except torch.OutOfMemoryError:
                self._where.is_full = True
        larger = (bucket for bucket in self._captured if covers(bucket, needed))
        return min(larger, key=cost, default=needed)

    def capture(self, key: Bucket, state: DeviceSlots) -> None:
        """Have its graph, now or from before."""
        if self._enabled and key not in self._captured:
            self._captured[key] = self._capture(key, state)

    def _capture(self, key: Bucket, state: DeviceSlots) -> tuple[torch.cuda.CUDAGraph, Launched[T]]:
        try:
            return self._record(key, state)
        except torch.OutOfMemoryError:
            # While it records, torch gives no cached memory back by itself.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return self._record(key, state)

    def _record(self, key: Bucket, state: DeviceSlots) -> tuple[torch.cuda.CUDAGraph, Launched[T]]:
        """Two eager runs on padding rows compile the kernels; the third is recorded."""
        count = key.num_versions * key.per_version
        slots = torch.full((count,), state.num_slots, dtype=torch.int64, device=self._device)
        stream = self._where.stream
        assert stream is not None
        state.lose_count()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._pass(key, slots)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which first waits for the device and frees all cached memory, the
        # pinned too. Meanwhile a thread may be loading a version.
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._where.pool, capture_error_mode="thread_local")
            try:
                result = self._pass(key, slots)
            except BaseException:
                with suppress(RuntimeError):  # of a capture that has failed
                    graph.capture_end()
                raise
            graph.capture_end()
        self._where.pool = self._where.pool or graph.pool()
        # A full collection that walks every imported module stalls the decode loop for longer than
        # a step; what is here now stays until the process ends.
        gc.collect()
        gc.freeze()
        return graph, Launched(slots, result, key.first, key.per_version)
