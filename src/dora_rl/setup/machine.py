"""What this machine has, and what a configuration would do on it. Starts nothing.

Problems are lines for a person, each with what to change; an empty list means the run fits.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.config import RunConfig
from dora_rl.weights.store import SHARED_MEMORY

if TYPE_CHECKING:
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
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * page


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _kernel_lanes() -> int:
    if _version("torch") is None:
        return 0
    from dora_rl.engine.cpu.library import load

    kernels = load()
    return kernels.lanes if kernels else 0


def _gpus() -> tuple[dict[str, Any], ...]:
    if _version("torch") is None:
        return ()
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append({"index": index, "name": name, "memory_bytes": total, "free_bytes": free})
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run would use. Bytes are estimates; `problems` say what does not fit."""

    mode: str
    device: str
    instances: int
    instance_gpus: tuple[str, ...]  # of each instance, as CUDA names them; () on a CPU
    instance_threads: int
    learner_threads: int
    colocated: bool
    resident_versions: int
    versions_fit: int
    version_bytes: int
    parameters: int
    kv_tokens_per_instance: int
    slots: int
    inflight_groups: int
    inflight_requests: int
    shm_needed_bytes: int
    problems: tuple[str, ...]

    def lines(self) -> list[str]:
        where = "on the learner's cores" if self.colocated else "beside the learner"
        gpus = [f"GPUs of the instances: {' '.join(self.instance_gpus)}"]
        return [
            f"{self.mode} on {self.device}: {self.instances} instances x {self.instance_threads} "
            f"threads {where}, learner with {self.learner_threads} threads",
            *(gpus if any(self.instance_gpus) else []),
            f"{self.parameters / 1e6:.2f} M parameters, {self.version_bytes / GIB:.3f} GiB a "
            f"version; an instance holds up to {self.resident_versions}, memory has room for "
            f"{self.versions_fit} more in all",
            f"in flight: up to {self.inflight_groups} groups = {self.inflight_requests} requests, "
            f"for {self.slots} decode slots; KV for {self.kv_tokens_per_instance} tokens "
            "an instance",
            f"shared memory for live versions: {self.shm_needed_bytes / GIB:.3f} GiB",
        ]


def forecast(config: RunConfig, machine: Machine, layout: Layout) -> Forecast:
    """Compare the layout of a run with the machine. The memory of GPUs is their plan's."""
    from dora_rl.core.modes import policy_of
    from dora_rl.engine.options import EngineOptions
    from dora_rl.engine.tensors import cache, memory
    from dora_rl.model.directory import read_spec
    from dora_rl.setup.settings import core_params

    device, params = layout.device, core_params(config)
    policy = policy_of(params)
    spec = read_spec(config.model.path)
    extra = layout.instance_extra(layout.instances[0])
    values = config.engine_options(device, layout.resident_max)
    values |= extra.get("sizes", {}).get("rollout", {})
    options = EngineOptions(**values, memory_share=extra["memory_share"])
    each = memory.version_bytes(spec, options.dtype)
    free = machine.memory_free_bytes if device == "cpu" else memory.free_bytes(device)
    groups = min(params.inflight_groups, policy.cap or params.inflight_groups)
    plan = Forecast(
        mode=params.mode.value,
        device=device,
        instances=len(layout.instances),
        instance_gpus=tuple(",".join(place.gpus) for place in layout.places.values()),
        instance_threads=config.rollout.threads,
        learner_threads=layout.learner_threads,
        colocated=layout.elastic,
        resident_versions=layout.resident_max,
        versions_fit=memory.versions_that_fit(spec, options.dtype, int(free * 0.9)),
        version_bytes=each,
        parameters=each // cache.DTYPES[options.dtype].itemsize,
        kv_tokens_per_instance=cache.derive_num_blocks(spec, options) * options.block_tokens,
        slots=len(layout.instances) * options.seqs_max,
        inflight_groups=groups,
        inflight_requests=groups * params.group_size,
        # The window, and the version that is being published.
        # Live versions, the one that is being sealed, and beside two of them what makes their
        # masters exact: as large as the version where that is half of a master, else small.
        shm_needed_bytes=each * (policy.max_staleness + 4),
        problems=(),
    )
    crowd = 0 if layout.memory is not None else layout.crowd
    problems = tuple(_problems(plan, config, machine, spec.context_max, crowd))
    return Forecast(**{**asdict(plan), "problems": problems})


def _problems(
    plan: Forecast, config: RunConfig, machine: Machine, context: int, crowd: int
) -> list[str]:
    """`crowd` instances share a device; 0: its memory is planned elsewhere."""
    found = []
    needed = plan.resident_versions * crowd
    if plan.versions_fit < needed:
        found.append(
            f"{needed} resident versions do not fit, only {plan.versions_fit}: lower "
            "orchestration.max_staleness, rollout.versions_max or rollout.num_instances"
        )
    if plan.shm_needed_bytes > machine.shm_free_bytes:
        found.append("shared memory is too small for the live versions: set weights.root")
    if plan.device == "cpu" and plan.instances * plan.instance_threads > machine.cores:
        found.append(
            f"{plan.instances} instances x {plan.instance_threads} threads on {machine.cores} "
            "cores: lower rollout.num_instances or rollout.threads"
        )
    if plan.inflight_requests > plan.slots:
        found.append(
            f"{plan.inflight_requests} requests wanted in flight, but only {plan.slots} slots: "
            "raise rollout.seqs_max or lower orchestration.inflight_groups"
        )
    if config.rollout.tokens_max >= context:
        found.append(
            f"rollout.tokens_max ({config.rollout.tokens_max}) leaves no room for a prompt in "
            f"the model's {context} positions"
        )
    return found
