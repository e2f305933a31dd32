"""Runs a plan's rows on the CPU: builds the batch, calls the model, samples.

For any model and data type; the oracle of the compiled kernels, which replace it where they can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora_rl.engine.cpu.attention import PairTensors
from dora_rl.engine.cpu.batch import HostBatch, Prefill, Segment, build
from dora_rl.engine.cpu.decoder import Decoder, RowBatch
from dora_rl.engine.cpu.host import HostRunner, next_logprobs
from dora_rl.engine.cpu.linear import RowLinear
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Span, StepResult
from dora_rl.engine.tensors import sampler
from dora_rl.engine.tensors.cache import KvCache
from dora_rl.engine.tensors.sampler import read_drawn
from dora_rl.model.directory import TensorSource
from dora_rl.model.spec import ModelSpec


class CpuRunner(HostRunner):
    """The torch half of an engine on the CPU."""

    def __init__(self, spec: ModelSpec, options: EngineOptions) -> None:
        super().__init__(spec, options)
        shapes = self.weights.linear_shapes() if options.dtype == "float32" else []
        linear = RowLinear(shapes, options.tile_rows)
        self.tile_rows = linear.tile_rows
        self.exact = bool(shapes) and linear.exact
        self.decoder = Decoder(spec, self.weights, linear, self.context)

    def load(self, slot: int, source: TensorSource, where: str) -> Iterator[str]:
        return self.weights.load_version(slot, source, where)

    @torch.inference_mode()
    def score(self, slot: int, token_ids: Sequence[int]) -> list[float]:
        """Float32 log-prob of each token after the first, without touching the KV pool."""
        count = len(token_ids)
        padded = -(-count // self.tile_rows) * self.tile_rows
        num_blocks = -(-padded // self.options.block_tokens)
        scratch = KvCache(self.spec, self.options, num_blocks)
        batch = chunk_batch(token_ids, padded, slot, scratch)
        with self._kernels():
            hidden = self.decoder.forward(batch, scratch)
            logits = self.decoder.logits(hidden, batch.segments)[: count - 1]
        return next_logprobs(logits, token_ids)

    def _kernels(self) -> AbstractContextManager[None]:
        """Bfloat16 without oneDNN: it uses AMX wherever the CPU names it, and virtual machines
        that name it without allowing it are killed by the first product."""
        if self.options.dtype == "float32":
            return nullcontext()
        return torch.backends.mkldnn.flags(enabled=False)

    def _run_pass(self, groups: list[tuple[int, list[Span]]]) -> list[StepResult]:
        with self._kernels():
            return self._compute(groups)

    def _compute(self, groups: list[tuple[int, list[Span]]]) -> list[StepResult]:
        for _, spans in groups:
            spans.sort(key=lambda span: span.num_rows > 1)
            self.tables.update(spans)
        host = build(
            groups, self.tables, self.options.block_tokens, self.tile_rows, self.cache.scrap_block
        )
        batch = to_rows(host, self.cache)
        hidden = self.decoder.forward(batch, self.cache)
        if not len(host.logit_rows):
            return []
        if len(host.segments) == 1 and len(host.logit_rows) == len(hidden):
            logits = self.decoder.logits(hidden, host.segments)  # nearly every step: all rows do
        else:
            gathered, segments, order = self._gather(host, hidden)
            logits = self.decoder.logits(gathered, segments)
            if len(segments) > 1 or len(logits) != len(order):
                logits = logits[order]
        rows = sampler.sampling_rows(host.logit_spans)
        return read_drawn(host.logit_spans, sampler.sample(logits, rows))

    def _gather(self, host: HostBatch, hidden: Tensor) -> tuple[Tensor, list[Segment], Tensor]:
        """Rows that need logits, in tile-padded version segments; where each of them went."""
        index: list[Tensor] = []
        segments: list[Segment] = []
        order: list[Tensor] = []
        rows = torch.from_numpy(host.logit_rows)
        start = 0
        for segment in host.segments:
            mine = rows[(rows >= segment.start) & (rows < segment.stop)]
            if not len(mine):
                continue
            padding = -len(mine) % self.tile_rows
            order.append(torch.arange(start, start + len(mine)))
            index.append(torch.cat((mine, mine[:1].expand(padding))) if padding else mine)
            stop = start + len(mine) + padding
            segments.append(Segment(segment.slot, start, stop))
            start = stop
        return hidden[torch.cat(index)], segments, torch.cat(order)


def to_rows(host: HostBatch, cache: KvCache) -> RowBatch:
    """Host arrays as the tensors of one pass."""
    block_tokens = cache.kv.shape[4]
    row_slots = None
    if len(host.segments) > 1:
        row_slots = torch.cat(
            [torch.full((s.stop - s.start,), s.slot, dtype=torch.int64) for s in host.segments]
        )
    return RowBatch(
        torch.from_numpy(host.token_ids),
        torch.from_numpy(host.positions),
        torch.from_numpy(write_index(host, cache)),
        host.segments,
        row_slots,
        PairTensors.make(host.decode, block_tokens) if host.decode else None,
        host.prefills,
    )


def write_index(host: HostBatch, cache: KvCache) -> NDArray[np.int64]:
    """Rows of `[2 * block * kv head * token, head dim]` that each batch row writes, flat."""
    _, _, num_blocks, num_kv, block_tokens, _ = cache.kv.shape
    parts = np.arange(2 * num_kv)
    planes = parts // num_kv * num_blocks  # keys in plane 0, values in plane 1
    first = (planes + host.write_blocks[:, None]) * num_kv + parts % num_kv
    return (first * block_tokens + (host.positions % block_tokens)[:, None]).reshape(-1)


def chunk_batch(token_ids: Sequence[int], padded: int, slot: int, cache: KvCache) -> RowBatch:
    """One text as one prefill chunk on blocks 0, 1, .. of a scratch cache."""
    block_tokens = cache.kv.shape[4]
    ids = np.zeros(padded, np.int64)
    ids[: len(token_ids)] = token_ids
    positions = np.arange(padded)
    blocks = tuple(range(-(-padded // block_tokens)))
    chunk = Prefill(0, padded, 0, blocks)
    segment = Segment(slot, 0, padded)
    host = HostBatch(
        ids, positions, positions // block_tokens, [segment], None, [chunk], positions[:0]
    )
    return to_rows(host, cache)
