"""What a run writes for people: metrics.jsonl, rollouts.jsonl, summary.json.

Only adds up what it is told; never decides. Names follow the field (design, section 7).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dora_rl.types import StepIndex, Version


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """One sample as it was trained."""

    group: int
    sample: int
    version: Version
    num_prompt: int
    num_tokens: int
    reward: float
    finish: str
    text: str
    prompt: str
    segments: int


@dataclass(slots=True)
class Totals:
    tokens_trained: int = 0
    tokens_generated: int = 0
    discarded_tokens: int = 0
    migrations: int = 0
    kv_bytes_moved: int = 0
    mixed: int = 0
    samples: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    wait_s: float = 0.0
    rewards: list[float] = field(default_factory=list[float])
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    busy_s: dict[str, float] = field(default_factory=dict[str, float])


class Records:
    """The files of one run directory."""

    def __init__(self, run_dir: Path, *, rollouts: bool) -> None:
        self.run_dir = run_dir
        self._metrics = (run_dir / "metrics.jsonl").open("a")
        self._rollouts = (run_dir / "rollouts.jsonl").open("a") if rollouts else None
        self.began = time.monotonic()
        self.step_began = self.began
        self.totals = Totals()

    def step(
        self,
        step: StepIndex,
        metrics: dict[str, float],
        samples: Sequence[TrainedSample],
        dropped: dict[str, int],
    ) -> dict[str, float]:
        """A step was committed: its line of metrics.jsonl."""
        now = time.monotonic()
        took, self.step_began = now - self.step_began, now
        totals = self.totals
        stale = [step - s.version for s in samples]
        lengths = np.array([s.num_tokens for s in samples])
        rewards = [s.reward for s in samples]
        tokens = int(lengths.sum()) + sum(s.num_prompt for s in samples)
        totals.tokens_trained += tokens
        totals.samples += len(samples)
        totals.staleness_sum += sum(stale)
        totals.staleness_max = max(totals.staleness_max, *stale)
        totals.mixed += sum(s.segments > 1 for s in samples)
        totals.rewards.append(float(np.mean(rewards)))
        line = {
            "step": step,
            **metrics,
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "staleness/mean": sum(stale) / len(stale),
            "staleness/max": max(stale),
            "mixed_version_frac": sum(s.segments > 1 for s in samples) / len(samples),
            "response_length/mean": float(lengths.mean()),
            "response_length/median": float(np.median(lengths)),
            "response_length/p99": float(np.percentile(lengths, 99)),
            "response_length/max": int(lengths.max()),
            "time/step": took,
            "perf/tokens_per_s": tokens / took,
            **{f"dropped/{name}": count for name, count in dropped.items()},
        }
        self._write(line)
        for sample in samples if self._rollouts is not None else ():
            self._rollout(step, sample)
        return line

    def _rollout(self, step: StepIndex, sample: TrainedSample) -> None:
        assert self._rollouts is not None
        record = {name: getattr(sample, name) for name in TrainedSample.__slots__}
        self._rollouts.write(json.dumps({"step": step, **record}) + "\n")

    def evaluation(self, version: Version, figures: dict[str, float]) -> None:
        self.totals.evaluations[version] = figures
        self._write({"version": version, **{f"eval/{k}": v for k, v in figures.items()}})

    def _write(self, line: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        if self._rollouts is not None:
            self._rollouts.flush()

    def summary(self, mode: str, steps: int, reason: str, num_cores: int) -> dict[str, Any]:
        """The figures of the whole run; written to summary.json."""
        totals = self.totals
        wall = time.monotonic() - self.began
        rollout = [busy for name, busy in totals.busy_s.items() if name != "learner"]
        evaluations = [totals.evaluations[v] for v in sorted(totals.evaluations)]
        figures = {
            "mode": mode,
            "steps": steps,
            "stopped": reason,
            "wall_s": wall,
            "tokens_trained": totals.tokens_trained,
            "tokens_generated": totals.tokens_generated,
            "tokens_per_s": totals.tokens_trained / wall,
            "reward_first": totals.rewards[0] if totals.rewards else None,
            "reward_last": totals.rewards[-1] if totals.rewards else None,
            "eval_first": evaluations[0] if evaluations else None,
            "eval_last": evaluations[-1] if evaluations else None,
            "staleness_mean": totals.staleness_sum / max(1, totals.samples),
            "staleness_max": totals.staleness_max,
            "mixed_version_frac": totals.mixed / max(1, totals.samples),
            "discarded_tokens": totals.discarded_tokens,
            "device_idle_ratio": max(0.0, 1 - sum(totals.cpu_s.values()) / (wall * num_cores)),
            "rollout_idle_ratio": 1 - sum(rollout) / (wall * max(1, len(rollout))),
            "trainer_idle_ratio": 1 - totals.busy_s.get("learner", 0.0) / wall,
            "migrations": totals.migrations,
            "kv_bytes_moved": totals.kv_bytes_moved,
        }
        path = self.run_dir / "summary.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(figures, indent=1))
        temporary.replace(path)
        return figures

    def close(self) -> None:
        self._metrics.close()
        if self._rollouts is not None:
            self._rollouts.close()
