"""`dora-rl plan`: split, staleness bound K and groups in flight for the best throughput, and why.

One knob is searched at a time, in the order split, groups in flight, K, until a round changes
nothing. More staleness must pay: of settings within one per cent of the fastest, the one with the
smaller K, then the fewer groups in flight, wins. The plan then looks one step along each knob.

The bottleneck is named by who is busy: a trainer or decoder that works all the time cannot be
helped by staleness, only by devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dora_rl.sim.compare import (
    Flow,
    Job,
    See,
    balanced_split,
    best_of,
    conduct,
    search_split,
    splits_of,
)
from dora_rl.sim.presets import Preset, mean_context, world_spec
from dora_rl.sim.report import duration, percent, split_text
from dora_rl.sim.run import ModeResult
from dora_rl.types import Mode

__all__ = ["Candidate", "Change", "Knobs", "PlanResult", "plan"]

_INFLIGHT = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)  # groups in flight, in batches
_STALENESS = (1, 2, 3)
_TIE = 0.01  # a gain below this is not worth more staleness
_ROUNDS_MAX = 4
_SHOWN = 5
_STEPS_MIN, _STEPS_MAX = 3, 30  # measured
_TRAJECTORIES = 2_000


def plan(
    preset: Preset, *, seed: int = 0, num_workers: int = 1, see: See | None = None
) -> PlanResult:
    """Search the best setting of `multi_version` on this testbed."""
    # Wrong input is refused before the first run.
    world_spec(preset, Mode.MULTI_VERSION, seed).params.validate()
    flow = _Search(preset, seed).flow()
    return conduct({"plan": flow}, num_workers, see or (lambda name, job, result: None))["plan"]


class _Search:
    """Every setting tried so far, and the moves along each knob."""

    def __init__(self, preset: Preset, seed: int) -> None:
        self.preset = preset
        self.measured = _measured(preset)
        self.seed = seed
        self.tried: dict[Knobs, ModeResult] = {}

    def job(self, knobs: Knobs) -> Job:
        preset = replace(
            self.measured,
            max_staleness=knobs.max_staleness,
            inflight_share=knobs.inflight_share,
            freshness=knobs.freshness,
            speculation=knobs.speculation,
        )
        return Job(preset, Mode.MULTI_VERSION, self.seed, knobs.rollout_devices)

    def flow(self) -> Flow[PlanResult]:
        knobs = yield from self._first_split()
        for _ in range(_ROUNDS_MAX):
            before = knobs
            # The bound admits at most K + 1 batches, so more in flight would change nothing.
            shares = [share for share in _INFLIGHT if share <= knobs.max_staleness + 1]
            fuller = [replace(knobs, inflight_share=share) for share in shares]
            knobs = yield from self._along(knobs, fuller)
            staler = [replace(knobs, max_staleness=staleness) for staleness in _STALENESS]
            knobs = yield from self._along(knobs, staler)
            knobs = yield from self._climb_split(knobs)
            if knobs == before:
                break
        changes = self._one_step(knobs)
        yield from self._try([changed for _, changed in changes])
        return self._result(knobs, changes)

    def _try(self, settings: Sequence[Knobs]) -> Flow[None]:
        if fresh := [knobs for knobs in settings if knobs not in self.tried]:
            results = yield [self.job(knobs) for knobs in fresh]
            self.tried.update(zip(fresh, results, strict=True))

    def _first_split(self) -> Flow[Knobs]:
        """The best split at the preset's own K and groups in flight."""
        preset = self.preset
        first = (preset.max_staleness, preset.inflight_share)
        start = Knobs(0, *first, preset.freshness, preset.speculation)
        found = yield from search_split(
            splits_of(self.preset),
            balanced_split(self.preset),
            lambda split: self.job(replace(start, rollout_devices=split)),
        )
        for split, result in found.items():
            self.tried[replace(start, rollout_devices=split)] = result
        return replace(start, rollout_devices=best_of(found)[0])

    def _climb_split(self, knobs: Knobs) -> Flow[Knobs]:
        """Move the split by single steps for as long as that helps."""
        while True:
            near = [changed for _, changed in self._split_steps(knobs)]
            yield from self._try(near)
            if (best := max([knobs, *near], key=lambda k: self.tried[k].tokens_per_s)) == knobs:
                return knobs
            knobs = best

    def _along(self, knobs: Knobs, settings: Sequence[Knobs]) -> Flow[Knobs]:
        yield from self._try(settings)
        return self._modest([knobs, *settings])

    def _modest(self, settings: Sequence[Knobs]) -> Knobs:
        """The least stale of the settings that are as good as the fastest."""
        most = max(self.tried[knobs].tokens_per_s for knobs in settings)
        good = [k for k in settings if self.tried[k].tokens_per_s >= most * (1 - _TIE)]
        return min(good, key=lambda k: (k.max_staleness, k.inflight_share, k.rollout_devices))

    def _split_steps(self, knobs: Knobs) -> list[tuple[str, Knobs]]:
        tensor, splits = self.preset.tensor_parallel, splits_of(self.preset)
        total, now = self.preset.num_devices, knobs.rollout_devices
        moved = [n for n in (now + tensor, now - tensor) if n in splits]
        return [(f"Split {n} + {total - n}", replace(knobs, rollout_devices=n)) for n in moved]

    def _one_step(self, knobs: Knobs) -> list[tuple[str, Knobs]]:
        """The neighbours of a setting, one step along each knob."""
        steps = self._split_steps(knobs)
        k, share = knobs.max_staleness, knobs.inflight_share
        steps += [(f"K = {n}", replace(knobs, max_staleness=n)) for n in (k + 1, k - 1) if n >= 0]
        beside = [x for x in _INFLIGHT if x > share][:1] + [x for x in _INFLIGHT if x < share][-1:]
        steps += [(f"{x:g} batches in flight", replace(knobs, inflight_share=x)) for x in beside]
        fresh, drafts = not knobs.freshness, not knobs.speculation
        steps.append((f"Freshness {_on(fresh)}", replace(knobs, freshness=fresh)))
        return [*steps, (f"Speculation {_on(drafts)}", replace(knobs, speculation=drafts))]

    def _candidate(self, knobs: Knobs) -> Candidate:
        result, job = self.tried[knobs], self.job(knobs)
        spec = world_spec(job.preset, job.mode, self.seed, knobs.rollout_devices)
        _, instance, _ = spec.instances[0]
        full = mean_context(job.preset) * instance.slots_max / instance.kv_tokens_max
        kv_share = (1 - result.slot_idle_ratio) * full
        return Candidate(knobs, result, spec.params.inflight_groups, kv_share)

    def _result(self, knobs: Knobs, changes: list[tuple[str, Knobs]]) -> PlanResult:
        best, most = self._candidate(knobs), self.tried[knobs].tokens_per_s
        ranked = sorted(self.tried, key=lambda k: -self.tried[k].tokens_per_s)
        top = [knobs, *(k for k in ranked if k != knobs)][:_SHOWN]
        steps = [
            Change(what, self._candidate(k), self.tried[k].tokens_per_s / most - 1)
            for what, k in changes
        ]
        bottleneck, why = explain(best)
        return PlanResult(
            self.preset.name,
            self.preset.num_devices,
            self.seed,
            best,
            tuple(self._candidate(k) for k in top),
            tuple(steps),
            bottleneck,
            (why, *consequences(best, steps)),
            len(self.tried),
        )


def _measured(preset: Preset) -> Preset:
    """The same steps for every setting, and so many that a few long responses do not decide.

    The first K + 1 steps are no steady state: until the bound binds, the quickest groups fill
    them. The last K are not measured, because admission runs dry there.
    """
    staleness = max(_STALENESS)
    wanted = _TRAJECTORIES // (preset.batch_groups * preset.group_size)
    measured = min(_STEPS_MAX, max(_STEPS_MIN, wanted))
    steps = staleness + 1 + measured + staleness
    return replace(preset, num_steps=steps, warmup_steps=staleness + 1)


def _on(switch: bool) -> str:
    return "on" if switch else "off"


_BUSY = 0.9  # a resource in use for more than this share of the time is the bottleneck
_WORTH = 0.01  # a relative change of throughput that deserves a sentence


@dataclass(frozen=True, slots=True)
class Knobs:
    rollout_devices: int
    max_staleness: int
    inflight_share: float
    freshness: bool = False
    speculation: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting and what came out of it. `kv_share`: mean use of the KV cache."""

    knobs: Knobs
    result: ModeResult
    inflight_groups: int
    kv_share: float

    def as_json(self) -> dict[str, Any]:
        result, knobs = self.result, self.knobs
        return {
            "split": result.split,
            "max_staleness": knobs.max_staleness,
            "inflight_share": knobs.inflight_share,
            "inflight_groups": self.inflight_groups,
            "freshness": knobs.freshness,
            "speculation": knobs.speculation,
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
        before, after = (percent(1 - r.trainer_idle_ratio) for r in (best.result, result))
        effect = f"trainer busy {before} → {after}"
        lines.append(f"{change.what}: {verdict}, staleness {stale:+.2f}, {effect}.")
    return lines


def _with(knobs: Knobs) -> str:
    names = ("freshness", "speculation")
    return ", ".join(name for name in names if getattr(knobs, name)) or "–"


def plan_table(plan: PlanResult) -> Table:
    """The best settings, best first."""
    title = f"{plan.preset}: {plan.gpus} GPUs, seed {plan.seed}, {plan.num_runs} settings tried"
    heads = ("rollout + train", "K", "in flight", "with", "tokens/s", "step", "trainer busy")
    table = Table(title=title, box=SIMPLE_HEAD)
    for head in (*heads, "decode busy", "slots used", "staleness, max"):
        table.add_column(head, justify="right")
    for candidate in plan.top:
        result = candidate.result
        table.add_row(
            split_text(result),
            str(candidate.knobs.max_staleness),
            f"{candidate.inflight_groups} groups",
            _with(candidate.knobs),
            f"{result.tokens_per_s:,.0f}",
            duration(result.step_s),
            percent(1 - result.trainer_idle_ratio),
            percent(1 - result.instance_idle_ratio),
            percent(1 - result.slot_idle_ratio),
            f"{result.staleness_mean:.2f}, {result.staleness_max}",
        )
    return table
