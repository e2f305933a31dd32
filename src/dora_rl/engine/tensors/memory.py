"""How much fits: versions of the weights and blocks of the KV cache, from the memory there is.

Asked once, when an engine is made, which gets its weights here.
"""

from __future__ import annotations

import os

import torch

from dora_rl.engine.options import EngineOptions
from dora_rl.engine.tensors.weights import ModelWeights
from dora_rl.model.spec import ModelSpec
from dora_rl.types import UserError

GIB = 1 << 30


def free_bytes(device: str) -> int:
    """Free memory of the device (physical memory not in use, on the CPU)."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(torch.device(device))[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def version_bytes(spec: ModelSpec, dtype: str) -> int:
    """Weights of one version."""
    return ModelWeights(spec, 1, "meta", dtype).bytes_per_version


def versions_that_fit(spec: ModelSpec, dtype: str, num_bytes: int) -> int:
    return num_bytes // version_bytes(spec, dtype)


def make_weights(spec: ModelSpec, options: EngineOptions) -> ModelWeights:
    """Room for what the options say, if there is that much."""
    check_memory(spec, options)
    o = options
    return ModelWeights(spec, o.versions_max, o.device, o.dtype, o.lora_rank)


def check_memory(spec: ModelSpec, options: EngineOptions) -> None:
    """One line for the user instead of an allocation failure later."""
    free = free_bytes(options.device)
    if options.lora_rank:
        _check_lora_memory(spec, options, free)
        return
    fit = versions_that_fit(spec, options.dtype, int(free * 0.9))
    if fit < options.versions_max:
        each = version_bytes(spec, options.dtype)
        raise UserError(
            f"rollout.versions_max is {options.versions_max}: each version takes "
            f"{each / GIB:.2f} GiB and {options.device} has {free / GIB:.2f} GiB free; "
            f"at most {fit} fit"
        )


def _check_lora_memory(spec: ModelSpec, options: EngineOptions, free: int) -> None:
    o = options
    weights = ModelWeights(spec, o.versions_max, "meta", o.dtype, o.lora_rank)
    assert weights.adapters is not None
    slots = weights.adapters.bytes_per_version * o.versions_max
    if weights.bytes_per_version + slots > free * 0.9:
        raise UserError(
            f"rollout.versions_max is {o.versions_max}: the base takes "
            f"{weights.bytes_per_version / GIB:.2f} GiB, the adapters {slots / GIB:.2f} GiB, and "
            f"{o.device} has {free / GIB:.2f} GiB free"
        )
