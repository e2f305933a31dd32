"""What the two runners on the CPU share: the tensors of one engine and the order of a step.

Holds no request state. A subclass computes one pass over rows of several versions; `one_pass`
decides whether all versions go through one pass or each through its own, which is the oracle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dora_rl.engine.cpu.batch import BlockTables
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan, Span, StepResult
from dora_rl.engine.tensors.cache import KvCache, derive_num_blocks, perform
from dora_rl.engine.tensors.memory import make_weights
from dora_rl.model.spec import ModelSpec
from dora_rl.types import Version


class HostRunner(ABC):
    """Weights, cache and block tables in host memory."""

    depth = 0  # steps that may be in flight when a step returns
    loads_aside = False
    burst = 1

    def __init__(self, spec: ModelSpec, options: EngineOptions) -> None:
        self.spec, self.options = spec, options
        self.weights = make_weights(spec, options)
        self.num_blocks = derive_num_blocks(spec, options)
        self.cache = KvCache(spec, options, self.num_blocks)
        self.context = options.context_limit(spec.context_max)
        self.tables = BlockTables(options.seqs_max, -(-self.context // options.block_tokens))

    def warm_up(self, plain: bool) -> Iterator[None]:
        return iter(())  # a CPU's first step is as quick as any other

    @torch.inference_mode()
    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> list[StepResult]:
        """Perform the cache operations, compute the rows, draw the tokens."""
        self.perform(plan)
        groups: dict[int, list[Span]] = {}
        for span in plan.spans:
            groups.setdefault(slots[span.seq.version], []).append(span)
        ordered = sorted(groups.items())
        if not ordered:
            return []
        if self.options.one_pass:
            return self._run_pass(ordered)
        return [result for group in ordered for result in self._run_pass([group])]

    @abstractmethod
    def _run_pass(self, groups: list[tuple[int, list[Span]]]) -> list[StepResult]:
        """Compute the rows of `groups`, (version slot, spans) each, and draw their tokens."""

    def collect(self, launched: list[StepResult]) -> list[StepResult]:
        """The results of a launched step; on the CPU they are there already."""
        return launched

    @torch.inference_mode()
    def perform(self, plan: Plan) -> None:
        """The cache operations alone."""
        perform(plan, self.cache)


def next_logprobs(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """Float32 log-prob of each token after the first, from the logits before it."""
    target = torch.tensor(token_ids[1:])[:, None]
    return torch.log_softmax(logits, -1).gather(1, target)[:, 0].tolist()
