"""Named testbeds. A preset says what there is; the mode says how it is used.

Sync, partial and replication use every device for both phases; one-step-off and multi-version
split them between rollout and training (`rollout_devices`).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dora_rl.core.params import Deadlines, MoveCost, Params
from dora_rl.data.lengths import LengthModel, LogNormal, Pareto, mean_of, uniforms
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
    Trainer,
)
from dora_rl.sim.world import WorldSpec
from dora_rl.types import Mode, RequestId, UserError
from dora_rl.user_code import hint, require

COLOCATED = (Mode.SYNC, Mode.PARTIAL, Mode.REPLICATION)
BATCHED = (Mode.SYNC, Mode.ONE_STEP_OFF, Mode.REPLICATION)  # a whole batch starts at once


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
    trainer: Trainer = field(default_factory=Trainer)
    resident_max: int = 1
    report_s: float = 15.0
    freshness: bool = False  # the paper has none
    speculation: bool = False  # nor this
    streaming: bool = True
    kv_moves: bool = True
    repartition: bool = True
    oversample: float = 1.25

    @property
    def lengths_mean(self) -> float:
        return mean_of(self.lengths)

    def validate(self) -> None:
        self.device.validate()
        require(
            (
                self.num_devices >= 2 * self.tensor_parallel,
                f"{self.name} needs at least {2 * self.tensor_parallel} GPUs "
                f"(instances of {self.tensor_parallel}), not {self.num_devices}",
            ),
            (self.max_staleness >= 0, f"max_staleness must be 0 or more, not {self.max_staleness}"),
            (
                self.num_steps > self.warmup_steps,
                f"num_steps must be more than the {self.warmup_steps} warm-up steps",
            ),
        )


# The paper does not name its serving engine: one of 2025, with CUDA graphs (`constants`).
# `host_s` and `update_s` are fitted: benchmarks/reproduction.py --fit.
PAPER_ENGINE = Engine(host_s=8.2e-3, launch_s=5e-6, memory_share=0.85, requests_max=512)
# 32.8 B parameters with 16 bytes each for training: at least a node of eight devices a copy.
PAPER_TRAINER = Trainer(model_parallel=8, update_s=10.4)

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
        engine=PAPER_ENGINE,
        trainer=PAPER_TRAINER,
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
        engine=replace(PAPER_ENGINE, requests_max=1024),
        trainer=Trainer(model_parallel=64, update_s=4.0),
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
    require((name in PRESETS, f"unknown preset {name!r}{hint(name, PRESETS)}"))
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


KV_FILL = 0.85  # of the cache; the rest is for batches that are longer than the mean


def slots_of(preset: Preset, cost: RolloutCost, at_once: int | None = None) -> int:
    """Requests an instance holds without running out of KV cache.

    `at_once` is how many it is given together, if not one after the other: those are all short at
    first, and many have ended before the rest is long.
    """
    room = KV_FILL * cost.kv_tokens_max()
    fit = int(room / mean_context(preset))
    if at_once is not None:
        low, high = min(fit, at_once), min(cost.engine.requests_max, at_once)
        lengths = preset.lengths.draw(uniforms(0, at_once, at_once))
        while low < high:
            middle = (low + high + 1) // 2
            fits = kv_peak(lengths, preset.prompt_tokens, middle) <= room
            low, high = (middle, high) if fits else (low, middle - 1)
        fit = low
    return max(1, min(cost.engine.requests_max, fit))


def kv_peak(lengths: NDArray[np.int64], prompt_tokens: int, slots: int) -> float:
    """The most tokens in the cache while these requests are decoded, `slots` at a time.

    >>> kv_peak(np.array([10, 10]), 5, 2), kv_peak(np.array([10, 10]), 5, 1)
    (30.0, 15.0)
    """
    waiting = deque(int(n) for n in lengths)
    running: list[tuple[int, int]] = []  # the step in which it ends, its length
    now, tokens, peak = 0, 0.0, 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            length = waiting.popleft()
            heapq.heappush(running, (now + length, length))
            tokens += prompt_tokens
        end, length = heapq.heappop(running)
        tokens += (len(running) + 1) * (end - now)
        now, peak = end, max(peak, tokens)
        tokens -= prompt_tokens + length
    return peak


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
        preset.speculation,
    )
    train = TrainCost(
        preset.device,
        preset.model,
        preset.efficiency,
        training,
        preset.updates_per_step,
        preset.trainer,
    )
    num_instances = generating // preset.tensor_parallel
    at_once = -(-preset.batch_groups // num_instances) * preset.group_size
    slots = slots_of(preset, cost, at_once if mode in BATCHED else None)
    spec = InstanceSpec(slots, preset.resident_max, cost.kv_tokens_max(), colocated)
    names = [f"i{index:05d}" for index in range(num_instances)]
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
            link_bytes_per_s=preset.device.nic_bytes_per_s
            * preset.efficiency.network
            * preset.tensor_parallel,
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
