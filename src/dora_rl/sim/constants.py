"""What is known of the published testbed: every constant with the interval it may lie in, and why.

The values themselves stand in the preset `paper-64`; here are the bounds, which are judged from
data sheets and from published figures of that generation of GPUs and serving engines. Two constants
are free (`FREE`): nobody published them, and they are fitted to the one row of synchronous training
on 64 GPUs, inside their intervals. Nothing else is fitted to anything.

`draws` takes constants from all other intervals at once, so that a prediction can be given with
what is not known of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dora_rl.data.lengths import LogNormal
from dora_rl.sim.presets import Preset


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of the constant that `--set` calls `key`, and the choices where it is one of a few."""

    key: str
    low: float
    high: float
    source: str
    choices: tuple[int, ...] = ()

    def at(self, share: float) -> float:
        """The value below which this share of the interval lies.

        >>> Interval("x", 2.0, 4.0, "").at(0.25), Interval("x", 4, 16, "", (4, 8, 16)).at(0.5)
        (2.5, 8)
        """
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        return self.low + share * (self.high - self.low)


FIRST = {"engine.host_s": 6e-3, "trainer.update_s": 4.0}  # before anything was fitted
FREE = tuple(FIRST)

INTERVALS = (
    # The floor of a decode step.
    Interval(
        "engine.host_s",
        2e-3,
        20e-3,
        "schedule, build inputs, send them to all devices, sample, log-probs, output. "
        "vLLM 0.6's own profile (blog, 2024-09-05): 62 % of a step of an 8 B model on one H100 is "
        "host, that is 8 ms beside 5 on the device; later releases hide most of it, frameworks "
        "around them add their own",
    ),
    Interval(
        "engine.kernels_per_layer",
        9,
        14,
        "counted: two norms, QKV, bias, rotation, cache write, attention (and its reduction), "
        "output, gate and up, activation, down",
        choices=(9, 10, 11, 12, 13, 14),
    ),
    Interval(
        "engine.launch_s",
        2e-6,
        12e-6,
        "about 2 us between the kernels of a CUDA graph, 4 to 6 us for a launch by the driver, "
        "10 us by PyTorch: a step of an 8 B model on an H100 takes 8.4 ms eager, 5.1 as a graph: "
        "3.3 ms over 32 x 11 kernels",
    ),
    Interval(
        "engine.allreduce_s",
        8e-6,
        30e-6,
        "10 to 60 KB over NVLink: one-shot kernels about 8 us, NCCL 15 to 30 with the ranks' skew",
    ),
    # What grows with the batch.
    Interval(
        "engine.host_s_per_request",
        10e-6,
        50e-6,
        "25 us with vLLM 0.25.1 and log-probs on one H200 (measured by us); older ones more",
    ),
    Interval(
        "efficiency.decode_bandwidth",
        0.55,
        0.85,
        "of 3.35 TB/s: matrix-vector products 0.7 to 0.85, attention over pages 0.5 to 0.85",
    ),
    Interval(
        "efficiency.prefill", 0.35, 0.65, "of dense bf16: long prompts on Hopper, tensor-parallel"
    ),
    Interval(
        "engine.memory_share",
        0.70,
        0.92,
        "vLLM's default is 0.9; engines beside a trainer are usually given less",
    ),
    Interval("engine.activation_bytes", 2e9, 8e9, "workspaces, graphs, NCCL: per device"),
    Interval(
        "engine.requests_max",
        256,
        1024,
        "vLLM's default was 256, and is 1,024 on such a GPU since 2025",
        choices=(256, 512, 1024),
    ),
    Interval(
        "tensor_parallel",
        4,
        8,
        "not published; 32.8 B parameters in 2 bytes leave a cache on 4 or 8 devices",
        choices=(4, 8),
    ),
    # Training.
    Interval(
        "efficiency.training",
        0.25,
        0.45,
        "Megatron-LM's tables have 0.41 to 0.48 on H100 in pretraining; with samples of any length "
        "and recomputed layers 0.25 to 0.4 (a user of verl on H100: 0.33, its issue 965)",
    ),
    Interval(
        "trainer.model_parallel",
        4,
        16,
        "not published; 16 bytes for each of 32.8 B parameters are 525 GB",
        choices=(4, 8, 16),
    ),
    Interval(
        "trainer.balanced",
        0.0,
        1.0,
        "whether ranks are balanced by length is not published; trainers of the time do it for the "
        "whole batch, for each update, or not",
    ),
    Interval(
        "trainer.update_s",
        1.0,
        15.0,
        "start and end of the pipeline, launches of the layers for each small pack, the norm over "
        "all ranks, the optimizer (perhaps on the host), barriers, metrics",
    ),
    Interval(
        "efficiency.network",
        0.5,
        0.9,
        "of 400 Gb/s per device: NCCL's bus bandwidth over InfiniBand 0.8 to 0.9 at its best; 0.77 "
        "of NVLink measured on H100; several flows at once less",
    ),
    # Between the two.
    Interval(
        "engine.sleep_wake_s",
        2.0,
        20.0,
        "weights, optimizer and cache give room to each other: 8 GB a device over PCIe, and "
        "allocators, graphs, collectives on both sides",
    ),
    Interval("trainer.publish_s", 0.5, 5.0, "names and layouts changed, collectives begun"),
    Interval("engine.load_overhead_s", 0.5, 5.0, "connect, lay out, check"),
    Interval("engine.move_overhead_s", 0.005, 0.1, "two messages and an allocation"),
    Interval("device.host_bytes_per_s", 40e9, 60e9, "PCIe 5.0 x16: 64 GB/s nominal"),
    Interval("reward_s", 0.5, 5.0, "a rule over the text of a competition problem"),
    # The workload.
    Interval("lengths.mean", 2350, 2450, "published: 2.4 K"),
    Interval("lengths.sigma", 1.2, 1.4, "published: max / median about 28; 30,720 / 1,074 = 28.6"),
    Interval("prompt_tokens", 64, 256, "published: at most 2 K; such problems have 60 to 250"),
    # Of speculation, which the paper does not have.
    Interval(
        "engine.draft_share",
        0.5,
        1.1,
        "measured with another model (1.5 B) on shorter problems (GSM8K)",
    ),
    Interval("engine.draft_row_s", 0.0, 30e-6, "as a request, without its output"),
)
"""Exact by data sheet or definition, without an interval: the rates of the H800, the shape of
Qwen2.5-32B, batch, group, updates and K of the paper. Our own policy: 1.5 batches in flight, moves
at most every 30 s, at least every 60."""


def value_of(preset: Preset, key: str) -> float:
    """What the preset has for a constant."""
    if key == "lengths.mean":
        return preset.lengths_mean
    value: Any = preset
    for name in key.split("."):
        value = getattr(value, name)
    return value


def with_values(preset: Preset, values: Mapping[str, float]) -> Preset:
    """The preset with these constants."""
    changes: dict[str, Any] = {}
    lengths = {key.split(".")[1]: v for key, v in values.items() if key.startswith("lengths.")}
    if lengths and isinstance(preset.lengths, LogNormal):
        mean = lengths.get("mean", preset.lengths_mean)
        sigma = lengths.get("sigma", preset.lengths.sigma)
        changes["lengths"] = LogNormal.with_mean(mean, sigma, preset.lengths.tokens_max)
    for key, value in values.items():
        outer, _, inner = key.partition(".")
        if outer == "lengths":
            continue
        present = value_of(preset, key)
        exact = round(value) if isinstance(present, int) else value
        part = changes.get(outer, getattr(preset, outer))
        changes[outer] = replace(part, **{inner: exact}) if inner else exact
    return replace(preset, **changes)


def draws(num: int, seed: int = 0) -> list[dict[str, float]]:
    """So many sets of constants from the intervals of all that are not free. Every constant meets
    every part of its interval once (a Latin hypercube), so that few sets are enough."""
    rng = np.random.Generator(np.random.Philox(seed))
    columns: dict[str, list[float]] = {}
    for interval in INTERVALS:
        if interval.key not in FREE:
            shares = (rng.permutation(num) + rng.random(num)) / num
            columns[interval.key] = [interval.at(float(share)) for share in shares]
    return [{key: values[place] for key, values in columns.items()} for place in range(num)]
