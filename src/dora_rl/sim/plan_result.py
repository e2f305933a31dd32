"""What `dora-rl plan` answers: the settings it tried, the best, and why it is no better.

Pure figures and sentences about finished runs. The bottleneck is named by who is busy: a trainer
or decoder that works all the time cannot be helped by staleness, only by devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dora_rl.sim.report import duration, percent, split_text
from dora_rl.sim.run import ModeResult

_BUSY = 0.9  # a resource in use for more than this share of the time is the bottleneck
_WORTH = 0.01  # a relative change of throughput that deserves a sentence


@dataclass(frozen=True, slots=True)
class Knobs:
    rollout_devices: int
    max_staleness: int
    inflight_share: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting and what came out of it. `kv_share`: mean use of the KV cache."""

    knobs: Knobs
    result: ModeResult
    inflight_groups: int
    kv_share: float

    @property
    def tokens_per_s(self) -> float:
        return self.result.tokens_per_s

    def as_json(self) -> dict[str, Any]:
        result, knobs = self.result, self.knobs
        return {
            "split": result.split,
            "max_staleness": knobs.max_staleness,
            "inflight_share": knobs.inflight_share,
            "inflight_groups": self.inflight_groups,
            "tokens_per_s": result.tokens_per_s,
            "step_s": result.step_s,
            "rollout_only_share": result.rollout_only_share,
            "trainer_idle_ratio": result.trainer_idle_ratio,
            "instance_idle_ratio": result.instance_idle_ratio,
            "slot_idle_ratio": result.slot_idle_ratio,
            "kv_share": self.kv_share,
            "staleness_mean": result.staleness_mean,
            "staleness_max": result.staleness_max,
            "overhead_share": result.overhead_share,
        }


@dataclass(frozen=True, slots=True)
class Change:
    """One step along one knob, and the relative gain in throughput it would bring."""

    what: str
    candidate: Candidate
    gain: float


@dataclass(frozen=True, slots=True)
class PlanResult:
    """`best` first among `top`; `bottleneck` is trainer, rollout, kv or admission."""

    preset: str
    gpus: int
    seed: int
    best: Candidate
    top: tuple[Candidate, ...]
    changes: tuple[Change, ...]
    bottleneck: str
    reasons: tuple[str, ...]
    num_runs: int

    def as_json(self) -> dict[str, Any]:
        return {
            "preset": self.preset,
            "gpus": self.gpus,
            "seed": self.seed,
            "best": self.best.as_json(),
            "top": [candidate.as_json() for candidate in self.top],
            "changes": [
                {"what": c.what, "gain": c.gain, **c.candidate.as_json()} for c in self.changes
            ],
            "bottleneck": self.bottleneck,
            "reasons": list(self.reasons),
            "num_runs": self.num_runs,
        }


def explain(best: Candidate) -> tuple[str, str]:
    """Which resource limits the throughput, and the figures that say so."""
    result = best.result
    trainer, slots = 1 - result.trainer_idle_ratio, 1 - result.slot_idle_ratio
    decode = 1 - result.instance_idle_ratio
    if trainer >= _BUSY:
        why = f"the trainer is busy {percent(trainer)} of the time"
        return "trainer", f"Bottleneck: training; {why}; rollout keeps it fed."
    waits = f"the trainer waits {percent(1 - trainer)} of the time"
    if slots >= _BUSY:
        why = f"{percent(slots)} of the decode slots are in use (KV cache {percent(best.kv_share)})"
        return "kv", f"Bottleneck: KV memory of the rollout instances; {why} and {waits}."
    if decode >= _BUSY:
        why = f"the instances decode {percent(decode)} of the time and {waits}"
        return "rollout", f"Bottleneck: rollout; {why}; {percent(slots)} of the slots are in use."
    why = f"instances are idle {percent(1 - decode)} of the time although {waits}"
    return "admission", f"Bottleneck: too few groups in flight, or too small a K; {why}."


def consequences(best: Candidate, changes: Sequence[Change]) -> list[str]:
    """One sentence per knob: what one step more would do."""
    lines = [
        f"Staleness: mean {best.result.staleness_mean:.2f}, at most {best.result.staleness_max} "
        f"of the {best.knobs.max_staleness} allowed; KV cache {percent(best.kv_share)} used; "
        f"overhead of loads and moves {percent(best.result.overhead_share)}."
    ]
    for change in changes:
        result = change.candidate.result
        stale = result.staleness_mean - best.result.staleness_mean
        verdict = "no gain" if abs(change.gain) < _WORTH else f"{change.gain:+.1%} tokens/s"
        lines.append(f"{change.what}: {verdict}, staleness {stale:+.2f}, {_effect(best, result)}.")
    return lines


def _effect(best: Candidate, result: ModeResult) -> str:
    before = 1 - best.result.trainer_idle_ratio
    return f"trainer busy {percent(before)} → {percent(1 - result.trainer_idle_ratio)}"


def plan_table(plan: PlanResult) -> Table:
    """The best settings, best first."""
    title = f"{plan.preset}: {plan.gpus} GPUs, seed {plan.seed}, {plan.num_runs} settings tried"
    table = Table(title=title, box=SIMPLE_HEAD)
    for head in ("rollout + train", "K", "in flight", "tokens/s", "step", "trainer busy"):
        table.add_column(head, justify="right")
    for head in ("decode busy", "slots used", "staleness, max"):
        table.add_column(head, justify="right")
    for candidate in plan.top:
        result = candidate.result
        table.add_row(
            split_text(result),
            str(candidate.knobs.max_staleness),
            f"{candidate.inflight_groups} groups",
            f"{result.tokens_per_s:,.0f}",
            duration(result.step_s),
            percent(1 - result.trainer_idle_ratio),
            percent(1 - result.instance_idle_ratio),
            percent(1 - result.slot_idle_ratio),
            f"{result.staleness_mean:.2f}, {result.staleness_max}",
        )
    return table
