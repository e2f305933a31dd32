"""Sums on the device, read once: metrics that never make the GPU wait in the middle of a step.

Invariant: a mean is Σ value / Σ weight over everything added since the last `read`, whatever the
number of packs, updates or ranks it came in.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from dora_rl.trainer import distributed

# Every mean there is, in a fixed order, so that ranks can add them up without exchanging names.
MEANS = (
    "loss",
    "kl",
    "ppo_kl",
    "entropy",
    "mismatch_kl",
    "mismatch_abs",
    "clip_ratio/low",
    "clip_ratio/high",
    "correction/weight_mean",
    "correction/masked_frac",
    "grad_norm",
    "lr",
    "mixed_version_frac",
    "truncated_frac",
    "critic/loss",
    "critic/value_mean",
    "critic/return_mean",
    "critic/error_square",
    "critic/grad_norm",
    "distill_kl",
    "moe/balance",
    "moe/load_max",
    "moe/mismatch",
    "moe/replayed",
)


class Meters:
    """Weighted means, counters and extremes by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._weights: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._extremes: defaultdict[str, list[float]] = defaultdict(list)

    def add_sum(self, name: str, total: Tensor, weight: float) -> None:
        """A sum over `weight` items, still on the device."""
        assert name in MEANS, name
        total = total.detach().to(torch.float64 if self._device.type == "cpu" else torch.float32)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._weights[name] += weight

    def count(self, name: str, amount: float = 1) -> None:
        self._counts[name] += amount

    def add(self, other: Meters) -> None:
        """Everything that another has seen."""
        for name, total in other._sums.items():
            self.add_sum(name, total, other._weights[name])
        for name, amount in other._counts.items():
            self.count(name, amount)
        for name, values in other._extremes.items():
            self._extremes[name] += values

    def observe(self, name: str, value: float) -> None:
        """A single number whose mean, min, max and std are wanted."""
        self._extremes[name].append(value)

    def read(self) -> dict[str, float]:
        """Everything since the last read, as plain floats; means are over all ranks."""
        pairs = {k: [v, self._weights[k]] for k, v in self._plain_sums().items()}
        if distributed.world()[1] > 1:  # a rank that never saw a name adds nothing
            flat = torch.tensor([pairs.get(n, [0.0, 0.0]) for n in MEANS], dtype=torch.float64)
            pairs = dict(zip(MEANS, distributed.add_up(flat).tolist(), strict=True))
        out = {k: total / weight for k, (total, weight) in pairs.items() if weight}
        out |= self._counts
        for name, values in self._extremes.items():
            out |= _spread(name, values)
        for part in (self._sums, self._weights, self._counts, self._extremes):
            part.clear()
        return out

    def _plain_sums(self) -> dict[str, float]:
        """One wait for the device, whatever the number of sums."""
        out: dict[str, float] = {}
        for device in {total.device for total in self._sums.values()}:
            there = {name: t for name, t in self._sums.items() if t.device == device}
            values = torch.stack([t.double() for t in there.values()]).tolist()
            out.update(zip(there, values, strict=True))
        return {name: out[name] for name in self._sums}


def _spread(name: str, values: list[float]) -> dict[str, float]:
    mean = sum(values) / len(values)
    return {
        f"{name}/mean": mean,
        f"{name}/min": min(values),
        f"{name}/max": max(values),
        f"{name}/std": (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5,
    }
