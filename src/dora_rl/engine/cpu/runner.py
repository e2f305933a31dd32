"""Runs a plan's rows on the CPU: the rows of a pass side by side, the model, the draw.

`CpuRunner` is what both ways share, `TorchRunner` computes any model and data type. `compiled` does
the same in C where it can, and has `TorchRunner` as its oracle.

Rows are ordered by version; each version's rows are padded to whole tiles, so that every matrix
product sees complete tiles of one version:

    version 0: r r r r r r r r r r - - - -   version 1: r r r r r ... - -

Padding rows carry token 0 at position 0 and write into the scrap block. `one_pass` decides whether
all versions go through one pass or each through its own, which is the oracle.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora_rl.engine.cpu.decoder import Decoder, RowLinear
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan, Span, StepResult
from dora_rl.engine.runner import Runner
from dora_rl.engine.sequence import Request, new_sequence
from dora_rl.engine.tensors import sampler
from dora_rl.engine.tensors.cache import KvCache
from dora_rl.model.spec import ModelSpec
from dora_rl.types import RequestId, Version

Ints = NDArray[np.int64]


class Batch(NamedTuple):
    """The rows of one pass. Segments are (version slot, first row, row behind the last)."""

    token_ids: Ints
    positions: Ints
    table_rows: Ints  # where the block table has each row's request
    segments: Ints
    logit_rows: Ints  # those that need logits
    logit_segments: Ints  # of `logit_rows`


class CpuRunner(Runner):
    """The order of a step in host memory."""

    tile_rows = 1  # that the rows of a version are padded to

    def __init__(self, spec: ModelSpec, options: EngineOptions) -> None:
        super().__init__(spec, options)
        # Block numbers of every running request, by slot, and in the last row those of padding.
        self._table = np.full(
            (options.seqs_max + 1, self.blocks_max), self.cache.scrap_block, np.int64
        )

    @torch.inference_mode()
    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> list[StepResult]:
        """Perform the cache operations, compute the rows, draw the tokens."""
        self.cache.perform(plan)
        groups: dict[int, list[Span]] = {}
        for span in plan.spans:
            seq = span.seq
            if seq.table_dirty:
                self._table[seq.slot, : len(seq.blocks)] = seq.blocks
                seq.table_dirty = False
            groups.setdefault(slots[seq.version], []).append(span)
        ordered = sorted(groups.items())
        passes = [ordered] if self.options.one_pass else [[group] for group in ordered]
        return [result for part in passes for result in self._run_pass(part)]

    def _run_pass(self, groups: list[tuple[int, list[Span]]]) -> list[StepResult]:
        if not groups:
            return []
        spans = [span for _, members in groups for span in members if span.num_logits]
        batch = batch_of(groups, self.tile_rows, len(self._table) - 1)
        logits = self._forward(batch, self.cache, self._table)
        return sampler.read_drawn(spans, self._draw(logits, spans)) if spans else []

    def collect(self, launched: list[StepResult]) -> list[StepResult]:
        return launched  # on the CPU they are there already

    @torch.inference_mode()
    def score(self, slot: int, token_ids: Sequence[int]) -> list[float]:
        """As one prefill chunk on blocks 0, 1, .. of a scratch cache."""
        text = new_sequence(Request(RequestId(0, 0), 0, tuple(token_ids)), 0, ())
        text.slot = 0
        span = Span(text, 0, len(token_ids), 0, len(token_ids) - 1, False)
        scratch = KvCache(self.spec, self.options, -(-len(token_ids) // self.options.block_tokens))
        table = np.stack(
            (np.arange(scratch.num_blocks), np.full(scratch.num_blocks, scratch.scrap_block))
        )
        logits = self._forward(batch_of([(slot, [span])], self.tile_rows, 1), scratch, table)
        following = torch.tensor(token_ids[1:])[:, None]
        return torch.log_softmax(logits, -1).gather(1, following)[:, 0].tolist()

    @abstractmethod
    def _forward(self, batch: Batch, cache: KvCache, table: Ints) -> Tensor:
        """Float32 logits of the rows that need them; keys and values are written on the way."""

    def _draw(self, logits: Tensor, spans: Sequence[Span]) -> sampler.Drawn:
        return sampler.sample(logits, sampler.sampling_rows(spans))


class TorchRunner(CpuRunner):
    """Any model, in float32 or bfloat16."""

    def __init__(self, spec: ModelSpec, options: EngineOptions) -> None:
        super().__init__(spec, options)
        shapes = self.weights.linear_shapes() if options.dtype == "float32" else set()
        linear = RowLinear(shapes, options.tile_rows)
        self.tile_rows, self.exact = linear.tile_rows, bool(shapes) and linear.exact
        self._decoder = Decoder(spec, self.weights, linear, self.context)

    def _forward(self, batch: Batch, cache: KvCache, table: Ints) -> Tensor:
        # Bfloat16 without oneDNN: it uses AMX wherever the CPU names it, and virtual machines that
        # name it without allowing it are killed by the first product.
        with (
            nullcontext()
            if self.options.dtype == "float32"
            else torch.backends.mkldnn.flags(enabled=False)
        ):
            return self._decoder.forward(batch, cache, table)


def batch_of(
    groups: Sequence[tuple[int, Sequence[Span]]], tile_rows: int, padding_row: int
) -> Batch:
    """Rows of `groups`, (version slot, spans) each, as drawn above; `padding_row` is theirs in the
    block table."""
    token_ids: list[int] = []
    positions: list[int] = []
    table_rows: list[int] = []
    logit_rows: list[int] = []
    segments: list[tuple[int, int, int]] = []
    logit_segments: list[tuple[int, int, int]] = []
    for slot, spans in groups:
        begin, logits_begin = len(token_ids), len(logit_rows)
        for span in spans:
            seq, start, count, logits_start, num_logits = span[:5]
            if num_logits:
                first = len(token_ids) + logits_start - start
                logit_rows.extend(range(first, first + num_logits))
            token_ids.extend(span.seq.row_ids(span.start, span.num_rows, span.drafts))
            positions.extend(range(start, start + count))
            table_rows.extend([seq.slot] * count)
        padding = -(len(token_ids) - begin) % tile_rows
        token_ids.extend([0] * padding)
        positions.extend([0] * padding)
        table_rows.extend([padding_row] * padding)
        segments.append((slot, begin, len(token_ids)))
        logit_segments.append((slot, logits_begin, len(logit_rows)))
    columns = (token_ids, positions, table_rows, segments, logit_rows, logit_segments)
    return Batch(*(np.array(column, np.int64) for column in columns))
