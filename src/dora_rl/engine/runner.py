"""What an engine needs of a device, and the choice of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dora_rl.engine.guessing import Guessing
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan, StepResult
from dora_rl.engine.tensors.cache import KvCache
from dora_rl.engine.tensors.weights import make_weights
from dora_rl.model.directory import TensorSource
from dora_rl.model.spec import ModelSpec
from dora_rl.types import Version


class Runner(ABC):
    """The computing half of an engine: weights, KV cache, and a way to run a plan's rows."""

    exact = False  # rows were measured not to depend on their batch mates
    depth = 0  # steps that may be in flight when a step returns
    loads_aside = False  # `load` may run in a thread of its own while others are launched
    burst = 1  # decode steps it would like to be given at once
    guessing: Guessing | None = None  # of a device that guesses by itself

    def __init__(self, spec: ModelSpec, options: EngineOptions) -> None:
        self.spec, self.options = spec, options
        self.weights = make_weights(spec, options)
        self.cache = KvCache(spec, options)
        self.context = options.context_limit(spec.context_max)
        self.blocks_max = -(-self.context // options.block_tokens)  # of one request

    def load(self, slot: int, source: TensorSource, where: str) -> Iterator[str]:
        """Fill the slot of a version, layer by layer."""
        return self.weights.load_version(slot, source, where)

    def warm_up(self, plain: bool) -> Iterator[None]:
        """Whatever is better done before there is work, a part at a time."""
        return iter(())

    @abstractmethod
    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> Any:
        """Begin a step; what this returns is for `collect` alone."""

    @abstractmethod
    def collect(self, launched: Any) -> list[StepResult]:
        """The tokens of a launched step."""

    def settle(self) -> None:
        """Wait until nothing of what was launched runs any more; nobody will collect it."""
        return

    @abstractmethod
    def score(self, slot: int, token_ids: Sequence[int]) -> list[float]:
        """Float32 log-prob of each token after the first, without touching the KV pool."""


def make_runner(spec: ModelSpec, options: EngineOptions) -> Runner:
    """The runner for the options' device; GPU code is imported only for a GPU."""
    options.check_model(spec)
    if options.device.startswith("cuda"):
        from dora_rl.engine.cuda.runner import CudaRunner

        return CudaRunner(spec, options)
    from dora_rl.engine.cpu.compiled import CompiledRunner, usable
    from dora_rl.engine.cpu.runner import TorchRunner

    kernels = usable(spec, options)
    return TorchRunner(spec, options) if kernels is None else CompiledRunner(spec, options, kernels)
