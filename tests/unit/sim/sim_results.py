"""Results as a run would give them, made by hand."""

from __future__ import annotations

from typing import Any

from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.run import ModeResult, Timeline


def made_result(mode: str = "multi_version", rollout: int = 4, **figures: Any) -> ModeResult:
    values: dict[str, Any] = {
        "step_s": 100.0,
        "rollout_only_share": 0.2,
        "tokens_per_s": 1000.0,
        "instance_idle_ratio": 0.1,
        "slot_idle_ratio": 0.3,
        "trainer_idle_ratio": 0.2,
        "staleness_mean": 0.5,
        "staleness_max": 2,
        "mixed_version_frac": 0.0,
        "discarded_tokens": 0,
        "migrations": 3,
        "kv_bytes_moved": 5e9,
        "overhead_share": 0.01,
        "overheads": {"load": 0.01},
        "length_bias": 1.0,
        "split": {"rollout": rollout, "train": 8 - rollout},
        "num_events": 10,
        "steps_measured": 3,
        "timeline": Timeline(VirtualClock()),
    }
    return ModeResult(mode=mode, **(values | figures))
