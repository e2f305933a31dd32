"""Which GPUs an instance of several devices sees on one machine.

On a cluster Ray hides the others; here the worker is told their names before it touches CUDA. The
learner's ranks have the first GPUs, and every instance the next ones, to itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from dora_rl.config import RunConfig
from dora_rl.types import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> tuple[str, ...]:
    """The GPUs of this process, as CUDA is told them."""
    told = os.environ.get(VISIBLE)
    if told is not None:
        return tuple(name.strip() for name in told.split(",") if name.strip())
    import torch

    return tuple(map(str, range(torch.cuda.device_count())))


def assign_gpus(
    config: RunConfig, instances: Sequence[str], gpus: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """The GPUs of each instance, no GPU twice."""
    each, first = config.resources.devices_per_instance, config.resources.learner_ranks
    wanted = first + each * len(instances)
    if wanted > len(gpus):
        raise UserError(
            f"resources.devices_per_instance = {each}: {len(instances)} instances and {first} "
            f"learner ranks need {wanted} GPUs, {len(gpus)} are visible; lower "
            "rollout.num_instances or run on a cluster (runtime.kind = ray)"
        )
    starts = range(first, wanted, each)
    return {name: tuple(gpus[at : at + each]) for name, at in zip(instances, starts, strict=True)}
