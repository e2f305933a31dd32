"""Runs a plan's rows on the CPU in one call of the compiled kernels.

Replaces `engine.runner.CpuRunner` where `usable` says so; that one is its oracle in the tests. Rows
are ordered by version and need no padding: rows never depend on each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora_rl.engine.cpu.host import HostRunner, next_logprobs
from dora_rl.engine.cpu.library import Kernels, LayerPointers, ModelPointers, StepPointers, load
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Span, StepResult
from dora_rl.engine.sequence import is_filtered
from dora_rl.engine.tensors import sampler
from dora_rl.engine.tensors.cache import KvCache
from dora_rl.engine.tensors.sampler import read_drawn
from dora_rl.engine.tensors.weights import ModelWeights
from dora_rl.model.directory import TensorSource
from dora_rl.model.rope import rope_tables
from dora_rl.model.spec import ModelSpec

Ints = NDArray[np.int64]
PACKED = ("qkv", "o", "gate_up", "down")
QUERIES_MAX = 4  # query heads that the attention takes at once


def usable(spec: ModelSpec, options: EngineOptions) -> Kernels | None:
    """The kernels, where they are wanted, can be had, and know this kind of model."""
    dense = spec.moe is None and not options.lora_rank and options.dtype == "float32"
    if not options.compiled_kernels or not dense:
        return None
    kernels = load()
    if kernels is None or not kernels.takes(spec.hidden, spec.intermediate, spec.head_dim):
        return None
    return kernels


class CompiledRunner(HostRunner):
    """The computing half of an engine on the CPU."""

    exact = True  # by construction; library.py checks it on a product, the tests on everything

    def __init__(self, spec: ModelSpec, options: EngineOptions, kernels: Kernels) -> None:
        super().__init__(spec, options)
        self._kernels = kernels
        self._cos, self._sin = (
            table.contiguous() for table in rope_tables(spec.rope, spec.head_dim, self.context)
        )
        self._model = _model_pointers(spec, self.weights, self._cos, self._sin)
        self._scratch = _Scratch(spec, options.step_tokens_max, self.context, kernels.lanes)

    def load(self, slot: int, source: TensorSource, where: str) -> Iterator[str]:
        """Fill a slot layer by layer; a layer's matrices are packed once they are complete."""
        for group in self.weights.load_version(slot, source, where):
            for matrix in self._matrices(group):
                self._kernels.pack(matrix[slot])
            yield group

    def _matrices(self, group: str) -> list[Tensor]:
        if group.isdigit():
            return [getattr(self.weights.layers[int(group)], name) for name in PACKED]
        head = "embed" if self.spec.tied else "lm_head"
        return [self.weights.lm_head] if group == head else []

    def score(self, slot: int, token_ids: Sequence[int]) -> list[float]:
        """Float32 log-prob of each token after the first, without touching the KV pool."""
        count = len(token_ids)
        num_blocks = -(-count // self.options.block_tokens)
        cache = KvCache(self.spec, self.options, num_blocks)
        scratch = _Scratch(self.spec, count, count, self._kernels.lanes)
        rows = _Rows(
            np.array(token_ids, np.int64),
            np.arange(count),
            np.zeros(count, np.int64),
            np.array([(slot, 0, count)], np.int64),
            np.arange(count - 1),
            np.array([(slot, 0, count - 1)], np.int64),
        )
        logits = self._forward(rows, cache, np.arange(num_blocks)[None], scratch)
        return next_logprobs(logits, token_ids)

    def _run_pass(self, groups: list[tuple[int, list[Span]]]) -> list[StepResult]:
        for _, spans in groups:
            self.tables.update(spans)
        rows, logit_spans = _rows_of(groups)
        logits = self._forward(rows, self.cache, self.tables.table, self._scratch)
        if not logit_spans:
            return []
        return read_drawn(logit_spans, self._draw(logits, logit_spans))

    def _forward(self, rows: _Rows, cache: KvCache, table: Ints, scratch: _Scratch) -> Tensor:
        """Logits of the rows that need them; keys and values are written on the way."""
        logits = torch.empty(len(rows.logit_rows), self.spec.vocab)
        threads = torch.get_num_threads()
        step = StepPointers(
            num_rows=len(rows.token_ids),
            num_segments=len(rows.segments),
            table_width=table.shape[1],
            block_tokens=self.options.block_tokens,
            num_blocks=cache.kv.shape[2],
            threads=threads,
            token_ids=rows.token_ids.ctypes.data,
            positions=rows.positions.ctypes.data,
            table_rows=rows.table_rows.ctypes.data,
            table=table.ctypes.data,
            logit_rows=rows.logit_rows.ctypes.data,
            segments=rows.segments.ctypes.data,
            logit_segments=rows.logit_segments.ctypes.data,
            kv=cache.kv.data_ptr(),
            logits=logits.data_ptr(),
        )
        scratch.lend(step)
        self._kernels.forward(ctypes.byref(self._model), ctypes.byref(step))
        return logits

    def _draw(self, logits: Tensor, spans: list[Span]) -> sampler.Drawn:
        """A token of each row; rows with filters or top log-probs are drawn by `sampler` instead.

        Which of the two draws is decided by the request alone, as everything about its tokens.
        """
        rows = sampler.logit_rows(spans)
        keys, positions, forced = (np.array(column, np.int64) for column in rows[:3])
        temperature = np.array([params.temperature for params in rows.owners], np.float32)
        count, vocab = logits.shape
        token, logprob = np.empty(count, np.int64), np.empty(count, np.float32)
        raw, scratch = np.empty(count, np.float32), self._scratch
        self._kernels.draw(
            logits.data_ptr(), count, vocab, keys.ctypes.data, positions.ctypes.data,
            temperature.ctypes.data, forced.ctypes.data, token.ctypes.data, logprob.ctypes.data,
            raw.ctypes.data, scratch.weight.data_ptr(), scratch.running.data_ptr(),
        )  # fmt: skip
        wants_raw = any(span.seq.request.params.raw_logprobs for span in spans)
        drawn = sampler.Drawn(
            torch.from_numpy(token),
            torch.from_numpy(logprob),
            torch.from_numpy(raw) if wants_raw else None,
            None,
            None,
        )
        special = [span for span in spans if _is_special(span)]
        return _overwrite(drawn, logits, spans, special) if special else drawn


@dataclass(frozen=True, slots=True)
class _Rows:
    """One pass in numpy: rows in order of version, segments are (slot, start, stop)."""

    token_ids: Ints
    positions: Ints
    table_rows: Ints
    segments: Ints
    logit_rows: Ints
    logit_segments: Ints


class _Scratch:
    """Buffers for one pass of at most `num_rows` rows."""

    def __init__(self, spec: ModelSpec, num_rows: int, context: int, lanes: int) -> None:
        self._x = torch.empty(num_rows, spec.hidden)
        self._h = torch.empty(num_rows, spec.hidden)
        self._wide = torch.empty(num_rows, max(spec.qkv_rows, 2 * spec.intermediate))
        self._mixed = torch.empty(num_rows, spec.num_heads * spec.head_dim)
        self._score_width = QUERIES_MAX * (-(-context // lanes) * lanes)
        self._score = torch.empty(0)
        chunks = -(-spec.vocab // sampler.CHUNK)
        self.weight = torch.empty(chunks * sampler.CHUNK)
        self.running = torch.empty(chunks, dtype=torch.float64)

    def lend(self, step: StepPointers) -> None:
        if len(self._score) < step.threads * self._score_width:
            self._score = torch.empty(step.threads * self._score_width)
        step.x, step.h = self._x.data_ptr(), self._h.data_ptr()
        step.wide, step.mixed = self._wide.data_ptr(), self._mixed.data_ptr()
        step.score, step.score_width = self._score.data_ptr(), self._score_width


def _model_pointers(
    spec: ModelSpec, weights: ModelWeights, cos: Tensor, sin: Tensor
) -> ModelPointers:
    """Addresses of all parameters; the tensors live as long as the runner."""
    layers = (LayerPointers * spec.num_layers)()
    for layer, pointers in zip(weights.layers, layers, strict=True):
        for field in LayerPointers._fields_:
            name = field[0]
            parameter: Tensor | None = getattr(layer, name)
            setattr(pointers, name, None if parameter is None else parameter.data_ptr())
    return ModelPointers(
        num_layers=spec.num_layers,
        hidden=spec.hidden,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        dim=spec.head_dim,
        inner=spec.intermediate,
        vocab=spec.vocab,
        tied=spec.tied,
        eps=spec.norm_eps,
        scale=spec.head_dim**-0.5,
        embed=weights.embed.data_ptr(),
        norm=weights.norm.data_ptr(),
        lm_head=weights.lm_head.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        layers=layers,
    )


def _rows_of(groups: Sequence[tuple[int, list[Span]]]) -> tuple[_Rows, list[Span]]:
    """Rows of `groups`, (version slot, spans) each, and the spans that need logits."""
    token_ids: list[int] = []
    positions: list[int] = []
    table_rows: list[int] = []
    logit_rows: list[int] = []
    logit_spans: list[Span] = []
    segments: list[tuple[int, int, int]] = []
    logit_segments: list[tuple[int, int, int]] = []
    for slot, spans in groups:
        begin, logits_begin = len(token_ids), len(logit_rows)
        for span in spans:
            seq, start, count, logits_start, num_logits, _ = span
            if num_logits:
                first = len(token_ids) + logits_start - start
                logit_rows.extend(range(first, first + num_logits))
                logit_spans.append(span)
            if count == 1:
                token_ids.append(seq.tokens[start])
                positions.append(start)
                table_rows.append(seq.slot)
            else:
                token_ids.extend(seq.tokens[start : start + count])
                positions.extend(range(start, start + count))
                table_rows.extend([seq.slot] * count)
        segments.append((slot, begin, len(token_ids)))
        logit_segments.append((slot, logits_begin, len(logit_rows)))
    arrays = (token_ids, positions, table_rows, segments, logit_rows, logit_segments)
    return _Rows(*(np.array(array, np.int64) for array in arrays)), logit_spans


def _is_special(span: Span) -> bool:
    params = span.seq.request.params
    return is_filtered(params) or params.logprobs_top_n > 0


def _overwrite(
    drawn: sampler.Drawn, logits: Tensor, spans: Sequence[Span], special: Sequence[Span]
) -> sampler.Drawn:
    """What `sampler` says of the special spans, in the place of what was drawn."""
    wanted = torch.cat([torch.full((span.num_logits,), _is_special(span)) for span in spans])
    there = sampler.sample(logits[wanted], sampler.sampling_rows(special))
    drawn.token_ids[wanted], drawn.logprobs[wanted] = there.token_ids, there.logprobs
    if drawn.raw_logprobs is not None and there.raw_logprobs is not None:
        drawn.raw_logprobs[wanted] = there.raw_logprobs
    if there.top_ids is not None and there.top_logprobs is not None:
        drawn.top_ids = torch.zeros(len(logits), there.top_ids.shape[1], dtype=torch.int64)
        drawn.top_logprobs = torch.zeros(drawn.top_ids.shape)
        drawn.top_ids[wanted], drawn.top_logprobs[wanted] = there.top_ids, there.top_logprobs
    return drawn
