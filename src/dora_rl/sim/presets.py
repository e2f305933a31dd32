"""Named testbeds. A preset says what there is; the mode says how it is used.

Sync, partial and replication use every device for both phases; one-step-off and multi-version
split them between rollout and training (`rollout_devices`).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace

import numpy as np

from dora_rl.core.params import Deadlines, MoveCost, Params
from dora_rl.data.lengths import LengthModel, LogNormal, Pareto, uniforms
from dora_rl.sim.fleet import InstanceSpec
from dora_rl.sim.hardware import (
    H800,
    LONGCAT_560B,
    QWEN25_32B,
    TINY_100M,
    Accelerator,
    Efficiency,
    Engine,
    ModelShape,
    RolloutCost,
    TrainCost,
)
from dora_rl.sim.world import WorldSpec
from dora_rl.types import Mode, RequestId, UserError

COLOCATED = (Mode.SYNC, Mode.PARTIAL, Mode.REPLICATION)


@dataclass(frozen=True, slots=True)
class Preset:
    """One testbed with its workload."""

    name: str
    device: Accelerator
    model: ModelShape
    num_devices: int
    tensor_parallel: int
    batch_groups: int
    group_size: int
    updates_per_step: int
    prompt_tokens: int
    lengths: LengthModel
    max_staleness: int = 2
    inflight_share: float = 1.5  # groups in flight, in batches
    num_steps: int = 8
    warmup_steps: int = 3
    reward_s: float = 1.0
    environment_s: float = 0.0  # mean, exponential, outside the decode slots
    efficiency: Efficiency = field(default_factory=Efficiency)
    engine: Engine = field(default_factory=Engine)
    resident_max: int = 1
    report_s: float = 15.0
    freshness: bool = False  # the paper has none
    streaming: bool = True
    kv_moves: bool = True
    repartition: bool = True
    oversample: float = 1.25

    def validate(self) -> None:
        self.device.validate()
        if self.num_devices < 2 * self.tensor_parallel:
            raise UserError(
                f"{self.name} needs at least {2 * self.tensor_parallel} GPUs "
                f"(instances of {self.tensor_parallel}), not {self.num_devices}"
            )
        if self.max_staleness < 0:
            raise UserError(f"max_staleness must be 0 or more, not {self.max_staleness}")
        if self.num_steps <= self.warmup_steps:
            raise UserError(f"num_steps must be more than the {self.warmup_steps} warm-up steps")


PRESETS = {
    # DORA's testbed (paper.md, "Figures to reproduce"). Mean response 2.4 K, at most 30 K, and
    # max/median about 28; sigma 1.3 gives that. Prompts of competition mathematics: about 128.
    "paper-64": Preset(
        "paper-64",
        H800,
        QWEN25_32B,
        num_devices=64,
        tensor_parallel=4,
        batch_groups=512,
        group_size=16,
        updates_per_step=16,
        prompt_tokens=128,
        lengths=LogNormal.with_mean(2400, 1.3, 30_720),
    ),
    # A large mixture of experts in agentic use: 64 K responses, environments that answer late.
    "moe-agentic": Preset(
        "moe-agentic",
        H800,
        LONGCAT_560B,
        num_devices=4096,
        tensor_parallel=16,
        batch_groups=1024,
        group_size=8,
        updates_per_step=4,
        prompt_tokens=2048,
        lengths=LogNormal.with_mean(9000, 1.2, 65_536),
        environment_s=60.0,
        report_s=60.0,
        num_steps=6,
    ),
    "small": Preset(
        "small",
        H800,
        TINY_100M,
        num_devices=8,
        tensor_parallel=1,
        batch_groups=16,
        group_size=4,
        updates_per_step=2,
        prompt_tokens=64,
        lengths=LogNormal.with_mean(400, 1.2, 4096),
    ),
    "small-pareto": Preset(
        "small-pareto",
        H800,
        TINY_100M,
        num_devices=8,
        tensor_parallel=1,
        batch_groups=16,
        group_size=4,
        updates_per_step=1,
        prompt_tokens=64,
        lengths=Pareto(1.3, 64, 8192),
    ),
}


def preset_named(name: str) -> Preset:
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PRESETS)}"
        raise UserError(f"unknown preset {name!r}; {hint}")
    return PRESETS[name]


@dataclass(eq=False)
class Task:
    """Prompt and response lengths as a pure function of (seed, prompt, sample)."""

    preset: Preset
    seed: int
    _drawn: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def __call__(self, prompt: int, sample: int) -> tuple[int, int]:
        if prompt not in self._drawn:
            self._drawn[prompt] = [
                int(n)
                for n in self.preset.lengths.draw(
                    uniforms(self.seed, prompt, self.preset.group_size)
                )
            ]
        return self.preset.prompt_tokens, self._drawn[prompt][sample]

    def latency_s(self, request: RequestId, prompt: int) -> float:
        mean = self.preset.environment_s
        if not mean:
            return self.preset.reward_s
        draw = float(uniforms(self.seed + 1, prompt, self.preset.group_size)[request.sample])
        return self.preset.reward_s - mean * float(np.log1p(-draw))


def rollout_devices_of(preset: Preset, mode: Mode, rollout_devices: int | None) -> int:
    """Devices that generate: all of them when colocated, else the given or a default half."""
    if mode in COLOCATED:
        return preset.num_devices
    tensor = preset.tensor_parallel
    if rollout_devices is None:
        rollout_devices = max(tensor, preset.num_devices // 2 // tensor * tensor)
    if rollout_devices % tensor or not tensor <= rollout_devices <= preset.num_devices - tensor:
        raise UserError(
            f"rollout devices must be a multiple of {tensor} between {tensor} and "
            f"{preset.num_devices - tensor}, not {rollout_devices}"
        )
    return rollout_devices


def mean_context(preset: Preset) -> float:
    """Mean tokens of a request in flight: long ones are met more often, E[L^2] / (2 E[L])."""
    lengths = preset.lengths.draw((np.arange(100_000) + 0.5) / 100_000).astype(np.float64)
    return preset.prompt_tokens + float((lengths**2).mean() / (2 * lengths.mean()))


def slots_of(preset: Preset, cost: RolloutCost) -> int:
    """Requests an instance holds without running out of KV cache."""
    fit = int(0.85 * cost.kv_tokens_max() / mean_context(preset))
    return max(1, min(cost.engine.requests_max, fit))


def world_spec(
    preset: Preset, mode: Mode, seed: int, rollout_devices: int | None = None
) -> WorldSpec:
    """The preset used in this mode."""
    preset.validate()
    colocated = mode in COLOCATED
    generating = rollout_devices_of(preset, mode, rollout_devices)
    training = preset.num_devices if colocated else preset.num_devices - generating
    cost = RolloutCost(
        preset.device,
        preset.model,
        preset.engine,
        preset.efficiency,
        preset.tensor_parallel,
        preset.resident_max,
    )
    train = TrainCost(
        preset.device, preset.model, preset.efficiency, training, preset.updates_per_step
    )
    spec = InstanceSpec(
        slots_of(preset, cost), preset.resident_max, cost.kv_tokens_max(), colocated
    )
    names = [f"i{index:05d}" for index in range(generating // preset.tensor_parallel)]
    task = Task(preset, seed)
    return WorldSpec(
        params=_params(preset, mode, cost),
        instances=tuple((name, spec, cost) for name in names),
        train=train,
        task=task,
        reward_of=lambda request, prompt: float((prompt * 31 + request.sample) % 2),
        latency_of=task.latency_s,
        report_s=preset.report_s,
        colocated_s=preset.engine.sleep_wake_s if colocated else 0.0,
    )


def _params(preset: Preset, mode: Mode, cost: RolloutCost) -> Params:
    return Params(
        mode=mode,
        max_staleness=preset.max_staleness,
        batch_groups=preset.batch_groups,
        group_size=preset.group_size,
        num_steps=preset.num_steps,
        inflight_groups=max(1, int(preset.inflight_share * preset.batch_groups)),
        updates_per_step=preset.updates_per_step,
        freshness=preset.freshness,
        streaming=preset.streaming,
        kv_moves=preset.kv_moves,
        repartition=preset.repartition,
        oversample=preset.oversample,
        rebalance_min_s=30.0,
        rebalance_period_s=60.0,
        cost=MoveCost(
            kv_bytes_per_token=preset.model.kv_bytes_per_token,
            link_bytes_per_s=preset.device.nic_bytes_per_s * preset.tensor_parallel,
            move_overhead_s=preset.engine.move_overhead_s,
            prefill_tokens_per_s=cost.prefill_tokens_per_s(),
        ),
        deadlines=Deadlines(
            report_s=10 * preset.report_s, load_s=600, move_s=300, score_s=3600, trainer_s=36_000
        ),
    )


def scaled(preset: Preset, gpus: int | None, batch_scale: float) -> Preset:
    """Another number of GPUs with the same batch, or another batch."""
    if batch_scale <= 0:
        raise UserError(f"--batch-scale must be positive, not {batch_scale}")
    groups = max(preset.updates_per_step, round(preset.batch_groups * batch_scale))
    groups -= groups % preset.updates_per_step
    return replace(preset, num_devices=gpus or preset.num_devices, batch_groups=groups)
