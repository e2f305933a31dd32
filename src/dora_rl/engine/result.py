"""What a pass gave each span, as plain Python values. No tensors leave the runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dora_rl.engine.plan import Span
from dora_rl.engine.sampler import Drawn

TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]


class StepResult(NamedTuple):
    """Tokens scored or drawn for one span, oldest first; `raw_logprobs` may be empty."""

    span: Span
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top_logprobs: list[TopLogprobs]


def read_drawn(spans: Sequence[Span], drawn: Drawn) -> list[StepResult]:
    """Split the rows of a pass over its spans."""
    token_ids = drawn.token_ids.tolist()
    logprobs = drawn.logprobs.tolist()
    raw = drawn.raw_logprobs.tolist() if drawn.raw_logprobs is not None else []
    if drawn.raw_logprobs is None and drawn.top_ids is None and len(spans) == len(token_ids):
        rows = zip(spans, token_ids, logprobs, strict=True)
        return [StepResult(span, [token], [logprob], [], []) for span, token, logprob in rows]
    top = _top(drawn)
    results: list[StepResult] = []
    start = 0
    for span in spans:
        end = start + span.num_logits
        params = span.seq.request.params
        results.append(
            StepResult(
                span,
                token_ids[start:end],
                logprobs[start:end],
                raw[start:end] if params.raw_logprobs else [],
                [row[: params.logprobs_top_n] for row in top[start:end]]
                if params.logprobs_top_n
                else [],
            )
        )
        start = end
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
    ids, values = drawn.top_ids.tolist(), drawn.top_logprobs.tolist()
    return [tuple(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True)]
