"""What this machine has, and what a configuration would do on it. Starts nothing.

Problems are lines for a person, each with what to change; an empty list means the run fits.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.config import RunConfig
from dora_rl.setup.memory import adapter_params, num_params
from dora_rl.weights.store import SHARED_MEMORY

if TYPE_CHECKING:
    from dora_rl.model.spec import ModelSpec
    from dora_rl.setup.layout import Layout

GIB = 1 << 30
LIBRARIES = [
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "pyarrow",
    "datasets",
    "math-verify",
    "matplotlib",
    "ray",
    "vllm",
    "flash-attn",
    "starlette",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
]


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts, as far as they can be had without a third library."""

    python: str
    cores: int
    cores_online: int
    memory_bytes: int
    memory_free_bytes: int
    shm_bytes: int
    shm_free_bytes: int
    kernel_lanes: int  # of the engine's compiled CPU kernels; 0: there are none
    gpus: tuple[dict[str, Any], ...]
    libraries: dict[str, str | None]

    def lines(self) -> list[str]:
        there = [f"{name} {version}" for name, version in self.libraries.items() if version]
        missing = [name for name, version in self.libraries.items() if not version]
        gpus = [
            f"GPU {gpu['index']}: {gpu['name']}, {gpu['free_bytes'] / GIB:.1f} of "
            f"{gpu['memory_bytes'] / GIB:.1f} GiB free"
            for gpu in self.gpus
        ]
        return [
            f"Python {self.python}; {self.cores} of {self.cores_online} cores may be used",
            f"memory {self.memory_free_bytes / GIB:.1f} of {self.memory_bytes / GIB:.1f} GiB free; "
            f"shared memory {self.shm_free_bytes / GIB:.1f} of {self.shm_bytes / GIB:.1f} GiB free",
            f"the engine's CPU kernels: compiled, {self.kernel_lanes} lanes"
            if self.kernel_lanes
            else "the engine's CPU kernels: none (no C compiler); generating on the CPU is slower",
            *(gpus or ["no GPU"]),
            "has " + ", ".join(there),
            "has not " + ", ".join(missing),
        ]


def look() -> Machine:
    page = os.sysconf("SC_PAGE_SIZE")
    shm = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return Machine(
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        cores_online=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * page,
        memory_free_bytes=_memory_free(page),
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        kernel_lanes=_kernel_lanes(),
        gpus=_gpus(),
        libraries={name: _version(name) for name in LIBRARIES},
    )


def _memory_free(page: int) -> int:
    """With what the kernel would give back from its caches, where it says so."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.is_file() else ()
    there = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(there, os.sysconf("SC_AVPHYS_PAGES") * page)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _kernel_lanes() -> int:
    if _version("torch") is None:
        return 0
    from dora_rl.engine.cpu.compiled import load_kernels

    kernels = load_kernels()
    return kernels.lanes if kernels else 0


def _gpus() -> tuple[dict[str, Any], ...]:
    if _version("torch") is None:
        return ()
    import torch

    memory = map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))
    return tuple(
        {
            "index": index,
            "name": torch.cuda.get_device_name(index),
            "memory_bytes": total,
            "free_bytes": free,
        }
        for index, (free, total) in enumerate(memory)
    )


def forecast(
    config: RunConfig, machine: Machine, layout: Layout
) -> tuple[dict[str, Any], list[str]]:
    """Compare the layout of a run with the machine: what the run would use, as figures (bytes are
    estimates) and as lines. Among the figures are `problems`, which say what does not fit; the
    memory of GPUs is their plan's."""
    from dora_rl.core.params import policy_of
    from dora_rl.engine.options import EngineOptions
    from dora_rl.engine.tensors import cache, weights
    from dora_rl.model.directory import read_spec
    from dora_rl.setup.settings import core_params

    device, params, spec = layout.device, core_params(config), read_spec(config.model.path)
    policy = policy_of(params)
    extra = layout.instance_extra(layout.instances[0])
    values = config.engine_options(device, layout.resident_max)
    values |= extra.get("sizes", {}).get("rollout", {})
    options = EngineOptions(**values, memory_share=extra["memory_share"])
    each = weights.version_bytes(spec, options.dtype)
    free = machine.memory_free_bytes if device == "cpu" else weights.free_bytes(device)
    groups = min(params.inflight_groups, policy.cap or params.inflight_groups)
    figures: dict[str, Any] = {
        "mode": params.mode.value,
        "device": device,
        "instances": len(layout.instances),
        # Of each instance, as CUDA names them; none on a CPU.
        "instance_gpus": tuple(",".join(place.gpus) for place in layout.places.values()),
        "instance_threads": config.rollout.threads,
        "learner_threads": layout.learner_threads,
        "colocated": layout.elastic,
        "resident_versions": layout.resident_max,
        "versions_fit": int(free * 0.9) // each,
        "version_bytes": each,
        "parameters": each // cache.DTYPES[options.dtype].itemsize,
        "kv_tokens_per_instance": cache.derive_num_blocks(spec, options) * options.block_tokens,
        "slots": len(layout.instances) * options.seqs_max,
        "inflight_groups": groups,
        "inflight_requests": groups * params.group_size,
        # Live versions, the one that is being sealed, and beside two of them what makes their
        # masters exact: as large as the version where that is half of a master, else small.
        "shm_needed_bytes": each * (policy.max_staleness + 4),
    }
    disk = _disk_bytes(config, spec, each)
    figures |= {"disk_needed_bytes": disk, "disk_free_bytes": _disk_free(config.runtime.run_dir)}
    # Versions on one device; 0: its memory is planned elsewhere.
    needed = 0 if layout.memory is not None else layout.resident_max * layout.crowd
    figures["problems"] = _problems(figures, config, machine, spec.context_max, needed)
    return figures, _forecast_lines(figures)


def _disk_bytes(config: RunConfig, spec: ModelSpec, version: int) -> int:
    """What lies in the run directory at the most, records apart: versions that are live or kept,
    two with what makes them exact; two sets of moments; checkpoints that are kept and one more."""
    trainer, trained = config.trainer, num_params(spec)
    if trainer.lora_rank:
        trained = adapter_params(spec, trainer.lora_rank)
        version = 4 * trained if trainer.lora_publish == "adapters" else version
    kept = config.orchestration.max_staleness + 5
    saved = config.checkpoint.keep + 1 if config.checkpoint.every_steps else 0
    return version * kept + (2 * 2 + 2 * 8) * trained + saved * (version + 12 * trained)


def _disk_free(run_dir: str) -> int:
    folder = Path(run_dir).absolute()
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _forecast_lines(plan: dict[str, Any]) -> list[str]:
    where = "on the learner's cores" if plan["colocated"] else "beside the learner"
    gpus = [f"GPUs of the instances: {' '.join(plan['instance_gpus'])}"]
    return [
        f"{plan['mode']} on {plan['device']}: {plan['instances']} instances x "
        f"{plan['instance_threads']} threads {where}, learner with {plan['learner_threads']} "
        "threads",
        *(gpus if any(plan["instance_gpus"]) else []),
        f"{plan['parameters'] / 1e6:.2f} M parameters, {plan['version_bytes'] / GIB:.3f} GiB a "
        f"version; an instance holds up to {plan['resident_versions']}, memory has room for "
        f"{plan['versions_fit']} more in all",
        f"in flight: up to {plan['inflight_groups']} groups = {plan['inflight_requests']} "
        f"requests, for {plan['slots']} decode slots; KV for {plan['kv_tokens_per_instance']} "
        "tokens an instance",
        f"shared memory for live versions: {plan['shm_needed_bytes'] / GIB:.3f} GiB",
        f"disk for versions, moments and checkpoints: up to {plan['disk_needed_bytes'] / GIB:.3f} "
        f"GiB, {plan['disk_free_bytes'] / GIB:.1f} are free",
    ]


def _problems(
    plan: dict[str, Any], config: RunConfig, machine: Machine, context: int, needed: int
) -> list[str]:
    """Whether each thing fits, and what to say where it does not."""
    threads = plan["instances"] * plan["instance_threads"]
    checks = (
        (
            plan["versions_fit"] >= needed,
            f"{needed} resident versions do not fit, only {plan['versions_fit']}: lower "
            "orchestration.max_staleness, rollout.versions_max or rollout.num_instances",
        ),
        (
            plan["shm_needed_bytes"] <= machine.shm_free_bytes,
            "shared memory is too small for the live versions: set weights.root",
        ),
        (
            plan["disk_needed_bytes"] <= plan["disk_free_bytes"],
            f"the disk of {config.runtime.run_dir} is too small: put runtime.run_dir on another, "
            "or lower checkpoint.keep (checkpoint.every_steps=0 keeps none)",
        ),
        (
            plan["device"] != "cpu" or threads <= machine.cores,
            f"{plan['instances']} instances x {plan['instance_threads']} threads on "
            f"{machine.cores} cores: lower rollout.num_instances or rollout.threads",
        ),
        (
            plan["inflight_requests"] <= plan["slots"],
            f"{plan['inflight_requests']} requests wanted in flight, but only {plan['slots']} "
            "slots: raise rollout.seqs_max or lower orchestration.inflight_groups",
        ),
        (
            config.rollout.tokens_max < context,
            f"rollout.tokens_max ({config.rollout.tokens_max}) leaves no room for a prompt in "
            f"the model's {context} positions",
        ),
    )
    return [problem for fits, problem in checks if not fits]
