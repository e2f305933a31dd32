"""What an engine needs of a device, and the choice of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan, StepResult
from dora_rl.engine.tensors.cache import KvCache
from dora_rl.engine.tensors.weights import ModelWeights
from dora_rl.model.directory import TensorSource
from dora_rl.model.spec import ModelSpec
from dora_rl.types import Version


class Runner(Protocol):
    """The torch half of an engine. What `launch` returns is for `collect` alone."""

    weights: ModelWeights
    cache: KvCache
    num_blocks: int
    exact: bool  # rows were measured not to depend on their batch mates
    depth: int  # steps that may be in flight when a step returns
    loads_aside: bool  # `load` may run in a thread of its own while others are launched
    burst: int  # decode steps it would like to be given at once

    def load(self, slot: int, source: TensorSource, where: str) -> Iterator[str]: ...
    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> Any: ...
    def collect(self, launched: Any) -> list[StepResult]: ...
    def warm_up(self, plain: bool) -> Iterator[None]: ...
    def perform(self, plan: Plan) -> None: ...
    def score(self, slot: int, token_ids: Sequence[int]) -> list[float]: ...


def make_runner(spec: ModelSpec, options: EngineOptions) -> Runner:
    """The runner for the options' device; GPU code is imported only for a GPU."""
    if options.device.startswith("cuda"):
        from dora_rl.engine.cuda.runner import CudaRunner

        return CudaRunner(spec, options)
    from dora_rl.engine.cpu.compiled import CompiledRunner, usable

    kernels = usable(spec, options)
    if kernels is not None:
        return CompiledRunner(spec, options, kernels)
    from dora_rl.engine.cpu.runner import CpuRunner

    return CpuRunner(spec, options)
