"""`dora-rl plan`: split, staleness bound K and groups in flight for the best throughput, and why.

One knob is searched at a time, in the order split, groups in flight, K, until a round changes
nothing. More staleness must pay: of settings within one per cent of the fastest, the one with the
smaller K, then the fewer groups in flight, wins. The plan then looks one step along each knob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dora_rl.sim.flows import Flow, Job, See, conduct
from dora_rl.sim.plan_result import Candidate, Change, Knobs, PlanResult, consequences, explain
from dora_rl.sim.presets import Preset, world_spec
from dora_rl.sim.run import ModeResult
from dora_rl.sim.split import balanced_split, best_of, search_split, splits_of
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
            self.measured, max_staleness=knobs.max_staleness, inflight_share=knobs.inflight_share
        )
        return Job(preset, Mode.MULTI_VERSION, self.seed, knobs.rollout_devices)

    def flow(self) -> Flow[PlanResult]:
        knobs = yield from self._first_split()
        for _ in range(_ROUNDS_MAX):
            before = knobs
            knobs = yield from self._along(knobs, _inflight_choices(knobs))
            knobs = yield from self._along(knobs, _staleness_choices(knobs))
            knobs = yield from self._climb_split(knobs)
            if knobs == before:
                break
        changes = self._one_step(knobs)
        yield from self._try([changed for _, changed in changes])
        return self._result(knobs, changes)

    def _try(self, settings: Sequence[Knobs]) -> Flow[None]:
        fresh = [knobs for knobs in settings if knobs not in self.tried]
        if fresh:
            results = yield [self.job(knobs) for knobs in fresh]
            self.tried.update(zip(fresh, results, strict=True))

    def _first_split(self) -> Flow[Knobs]:
        """The best split at the preset's own K and groups in flight."""
        start = Knobs(0, self.preset.max_staleness, self.preset.inflight_share)
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
            best = max([knobs, *near], key=lambda k: self.tried[k].tokens_per_s)
            if best == knobs:
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
        for staleness in (knobs.max_staleness + 1, knobs.max_staleness - 1):
            if staleness >= 0:
                steps.append((f"K = {staleness}", replace(knobs, max_staleness=staleness)))
        fuller = min((x for x in _INFLIGHT if x > knobs.inflight_share), default=None)
        leaner = max((x for x in _INFLIGHT if x < knobs.inflight_share), default=None)
        for share in (fuller, leaner):
            if share is not None:
                text = f"{share:g} batches in flight"
                steps.append((text, replace(knobs, inflight_share=share)))
        return steps

    def _candidate(self, knobs: Knobs) -> Candidate:
        result, job = self.tried[knobs], self.job(knobs)
        spec = world_spec(job.preset, job.mode, self.seed, knobs.rollout_devices)
        _, instance, _ = spec.instances[0]
        full = mean_context(job.preset) * instance.slots_max / instance.kv_tokens_max
        kv_share = (1 - result.slot_idle_ratio) * full
        return Candidate(knobs, result, spec.params.inflight_groups, kv_share)

    def _result(self, knobs: Knobs, changes: list[tuple[str, Knobs]]) -> PlanResult:
        best = self._candidate(knobs)
        ranked = sorted(self.tried, key=lambda k: -self.tried[k].tokens_per_s)
        top = [knobs, *(k for k in ranked if k != knobs)][:_SHOWN]
        steps = [
            Change(what, self._candidate(k), self.tried[k].tokens_per_s / best.tokens_per_s - 1)
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


def _inflight_choices(knobs: Knobs) -> list[Knobs]:
    """The bound admits at most K + 1 batches, so more would change nothing."""
    shares = [share for share in _INFLIGHT if share <= knobs.max_staleness + 1]
    return [replace(knobs, inflight_share=share) for share in shares]


def _staleness_choices(knobs: Knobs) -> list[Knobs]:
    return [replace(knobs, max_staleness=staleness) for staleness in _STALENESS]


def mean_context(preset: Preset) -> float:
    """Mean tokens of a request in flight: long ones are met more often, E[L^2] / (2 E[L])."""
    grid = (np.arange(100_000) + 0.5) / 100_000
    lengths = preset.lengths.draw(grid).astype(np.float64)
    return preset.prompt_tokens + float((lengths**2).mean() / (2 * lengths.mean()))
