"""Draws tokens from logits and reports their float32 log-probs.

Policy of a row: logits / temperature, then min-p, top-k and top-p filters in that order, then
softmax. The draw is the inverse of the cumulative distribution at a uniform number that depends on
(run seed, group, sample, position) alone. Temperature 0 takes the best token; its log-prob is then
the one at temperature 1 (a certain choice has none of its own). Invariant: all arithmetic is per
row, so a row's token does not depend on its batch mates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dora_rl.engine.plan import Span, StepResult, TopLogprobs
from dora_rl.engine.sequence import is_filtered
from dora_rl.types import SamplingParams

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MUL1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MUL2 = -7723592293110705685  # 0x94D049BB133111EB
_MASK = (1 << 64) - 1

CHUNK = 64  # tokens whose weights are summed at once before a draw


@dataclass(slots=True)
class SamplingRows:
    """Per-row settings, [rows] each. `forced` is a token to score, or -1 to draw one."""

    keys: Tensor
    positions: Tensor  # index of the token in the response
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    forced: Tensor
    scaled: bool  # any row has a temperature other than 1
    filtered: bool  # any row uses top_k, top_p or min_p
    raw: bool  # any row wants its log-prob at temperature 1
    top_n: int  # most log-probs wanted beside the drawn token


@dataclass(slots=True)
class Drawn:
    """[rows] tensors; a non-finite log-prob marks a row whose logits were not finite."""

    token_ids: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Float32 in [0, 1), 24 bits, from splitmix64 of key and position (int64, wrapping)."""
    if keys.device.type == "cpu":
        return torch.from_numpy(_uniform_host(keys.numpy(), positions.numpy()))
    x = keys + (positions + 1) * _GOLDEN
    x = (x ^ _shift(x, 30)) * _MUL1
    x = (x ^ _shift(x, 27)) * _MUL2
    x = x ^ _shift(x, 31)
    return _shift(x, 40).to(torch.float32) * 2.0**-24


def _uniform_host(keys: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """The same numbers; for a few rows numpy is many times quicker than torch."""
    x = keys.view(np.uint64) + (positions + 1).view(np.uint64) * np.uint64(_GOLDEN & _MASK)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MUL1 & _MASK)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MUL2 & _MASK)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of a signed integer."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(logits: Tensor, rows: SamplingRows) -> Drawn:
    """Draw (or score) one token per row of [rows, vocab] float32 logits."""
    greedy, scaled = rows.temperature <= 0, logits
    if rows.scaled:
        scaled = logits / torch.where(greedy, 1.0, rows.temperature)[:, None]
    if rows.filtered:
        scaled = _filter(scaled, rows)
    peak = scaled.amax(-1, keepdim=True)
    token, log_total = _draw((scaled - peak).exp_(), uniform(rows.keys, rows.positions))
    if rows.scaled:
        token = torch.where(greedy, logits.argmax(-1), token)
    token = torch.where(rows.forced >= 0, rows.forced, token)
    offset = peak[:, 0] + log_total
    drawn = Drawn(token, scaled.gather(1, token[:, None])[:, 0] - offset)
    if rows.raw:
        drawn.raw_logprobs = torch.log_softmax(logits, -1).gather(1, token[:, None])[:, 0]
    if rows.top_n:
        best, drawn.top_ids = scaled.topk(rows.top_n, -1)
        drawn.top_logprobs = best - offset[:, None]
    return drawn


def _draw(weight: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Token where the running sum of the weights passes u times their total, and log(total).

    Sums of chunks first, then inside one chunk: a running sum over the whole vocabulary costs more
    than everything else here. Rounding may leave nothing above the threshold in the chunk; then its
    last possible token is taken.
    """
    count, vocab = weight.shape
    if vocab % CHUNK:
        weight = functional.pad(weight, (0, -vocab % CHUNK))
    weight = weight.view(count, -1, CHUNK)
    running = weight.sum(-1).to(torch.float64).cumsum(-1)
    total = running[:, -1:]
    threshold = u[:, None] * total
    chunk = (running <= threshold).sum(-1, keepdim=True).clamp_(max=running.shape[1] - 1)
    before = functional.pad(running, (1, 0)).gather(1, chunk)
    inside = weight.gather(1, chunk[..., None].expand(-1, -1, CHUNK))[:, 0]
    place = (inside.cumsum(-1) <= threshold - before).sum(-1)
    last = CHUNK - 1 - (inside > 0).flip(-1).to(torch.uint8).argmax(-1)
    token = (chunk[:, 0] * CHUNK + torch.minimum(place, last)).clamp_(max=vocab - 1)
    return token, total[:, 0].log().to(torch.float32)


def _filter(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """Set what the filters exclude to -inf; a row that uses none keeps every value."""
    vocab = scaled.shape[1]
    off = -torch.inf
    floor = scaled.amax(-1, keepdim=True) + rows.min_p.clamp(min=1e-38).log()[:, None]
    scaled = scaled.masked_fill((scaled < floor) & (rows.min_p > 0)[:, None], off)
    ordered = scaled.sort(-1, descending=True).values
    k = torch.where(rows.top_k > 0, rows.top_k.clamp(max=vocab), vocab)
    kth = ordered.gather(1, (k - 1)[:, None])
    scaled = scaled.masked_fill(scaled < kth, off)
    ordered = ordered.masked_fill(ordered < kth, off)
    share = torch.softmax(ordered, -1)
    before = share.cumsum(-1) - share
    kept = ((before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None]).sum(-1).clamp_(min=1)
    lowest = ordered.gather(1, (kept - 1)[:, None])
    return scaled.masked_fill((scaled < lowest) & (rows.top_p < 1)[:, None], off)


class LogitRows(NamedTuple):
    """Of every row that needs logits: random key, position in the response, token to score or -1,
    and the parameters of its request."""

    keys: list[int]
    positions: list[int]
    forced: list[int]
    owners: list[SamplingParams]


def logit_rows(spans: Sequence[Span]) -> LogitRows:
    """In span order."""
    rows = LogitRows([], [], [], [])
    keys, positions, forced, owners = rows
    for span in spans:
        seq = span.seq
        first = span.logits_start + 1  # position of the first token that is scored or drawn
        num_drawn = 1 + len(span.drafts) if span.sample else 0
        num_scored = span.num_logits - num_drawn
        keys.extend([seq.key] * span.num_logits)
        owners.extend([seq.request.params] * span.num_logits)
        positions.extend(range(first - seq.num_prompt, first - seq.num_prompt + span.num_logits))
        forced.extend(seq.tokens[first : first + num_scored])
        forced.extend([-1] * num_drawn)
    return rows


def sampling_rows(spans: Sequence[Span]) -> SamplingRows:
    """Settings of every row that needs logits, as tensors."""
    keys, positions, forced, owners = logit_rows(spans)
    return SamplingRows(
        keys=torch.tensor(keys),
        positions=torch.tensor(positions),
        temperature=torch.tensor([p.temperature for p in owners]),
        top_k=torch.tensor([p.top_k for p in owners]),
        top_p=torch.tensor([p.top_p for p in owners]),
        min_p=torch.tensor([p.min_p for p in owners]),
        forced=torch.tensor(forced),
        scaled=any(p.temperature != 1 for p in owners),
        filtered=any(map(is_filtered, owners)),
        raw=any(p.raw_logprobs for p in owners),
        top_n=max(p.logprobs_top_n for p in owners),
    )


def read_drawn(spans: Sequence[Span], drawn: Drawn) -> list[StepResult]:
    """Split the rows of a pass over its spans."""
    token_ids, logprobs = drawn.token_ids.tolist(), drawn.logprobs.tolist()
    raw = drawn.raw_logprobs.tolist() if drawn.raw_logprobs is not None else []
    if drawn.raw_logprobs is None and drawn.top_ids is None and len(spans) == len(token_ids):
        rows = zip(spans, token_ids, logprobs, strict=True)
        return [StepResult(span, [token], [logprob], [], []) for span, token, logprob in rows]
    top = _top(drawn)
    results: list[StepResult] = []
    start = 0
    for span in spans:
        mine, params = slice(start, start + span.num_logits), span.seq.request.params
        tokens = (token_ids[mine], logprobs[mine], raw[mine] if params.raw_logprobs else [])
        best = [row[: params.logprobs_top_n] for row in top[mine] if params.logprobs_top_n]
        results.append(StepResult(span, *tokens, best))
        start = mine.stop
    return results


def read_burst(
    spans: Sequence[Span], rows: Sequence[int], data: NDArray[np.int32]
) -> list[StepResult]:
    """What each span drew in `data` [step, (token, bits of the log-prob), row], oldest first."""
    token_ids = data[:, 0].T.tolist()
    logprobs = data[:, 1].view(np.float32).T.tolist()
    return [
        StepResult(span, token_ids[row], logprobs[row], [], [])
        for span, row in zip(spans, rows, strict=True)
    ]


def _top(drawn: Drawn) -> list[TopLogprobs]:
    if drawn.top_ids is None or drawn.top_logprobs is None:
        return []
    rows = zip(drawn.top_ids.tolist(), drawn.top_logprobs.tolist(), strict=True)
    return [tuple(zip(*row, strict=True)) for row in rows]
