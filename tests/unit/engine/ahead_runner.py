"""A runner that is ahead of its engine, as a GPU is: for tests of what the host knows too late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dora_rl.engine.plan import Plan, Span, StepResult
from dora_rl.engine.runner import Runner
from dora_rl.engine.sequence import Sequence
from dora_rl.types import Version


class AheadRunner:
    """Computes with another runner; the engine reads a step only after the next was launched, and
    is asked for bursts. Tokens that it has not read yet are known here alone."""

    depth = 1
    loads_aside = True

    def __init__(self, inner: Runner, burst: int) -> None:
        self.inner, self.burst = inner, burst
        self.num_bursts = 0
        self._drawn: dict[Sequence, dict[int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> list[StepResult]:
        self.num_bursts += plan.repeat > 1
        found: dict[Sequence, StepResult] = {}
        for index in range(plan.repeat):
            spans = [_shifted(span, index) for span in plan.spans]
            step = replace(plan, spans=spans, cache_ops=[] if index else plan.cache_ops, repeat=1)
            for result in self._launch_one(step, slots):
                seq = result.span.seq
                if seq in found:
                    found[seq].token_ids.extend(result.token_ids)
                    found[seq].logprobs.extend(result.logprobs)
                else:
                    found[seq] = result
        return list(found.values())

    def _launch_one(self, plan: Plan, slots: Mapping[Version, int]) -> list[StepResult]:
        lengths = [len(span.seq.tokens) for span in plan.spans]
        for span, length in zip(plan.spans, lengths, strict=True):
            end = span.start + span.num_rows - len(span.drafts)
            span.seq.tokens += [self._drawn[span.seq][p] for p in range(length, end)]
        results = self.inner.collect(self.inner.launch(plan, slots))
        for span, length in zip(plan.spans, lengths, strict=True):
            del span.seq.tokens[length:]
        for result in results:
            span = result.span
            if span.sample and not span.drafts:  # steps with drafts are read at once
                drawn = self._drawn.setdefault(span.seq, {})
                drawn[span.start + span.num_rows] = result.token_ids[-1]
        return results

    def collect(self, launched: list[StepResult]) -> list[StepResult]:
        return launched


def _shifted(span: Span, index: int) -> Span:
    return span._replace(start=span.start + index, logits_start=span.logits_start + index)
