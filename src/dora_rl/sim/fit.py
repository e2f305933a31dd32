"""The two free constants from the one row of synchronous training on 64 GPUs.

The row has two figures that a free constant each answers for: the time in which only rollout works
follows `engine.host_s`, the rest of the step `trainer.update_s`. No other row of any table comes in
here: `fit` is given a single one, and simulates nothing but `sync`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dora_rl.sim.compare import Flow, Job, conduct
from dora_rl.sim.constants import FIRST, FREE, INTERVALS, with_values
from dora_rl.sim.presets import Preset
from dora_rl.sim.run import ModeResult
from dora_rl.types import Mode

ROUNDS_MAX = 8
CLOSE_S = 6.0  # to either time, of some 900 and 500 s; the controller looks every 5 s
STEPS, WARMUP = 8, 1  # every step of sync is alike, but for its lengths


@dataclass(frozen=True, slots=True)
class Row:
    """What is published of one mode: the whole step, and the part in which only rollout works."""

    step_s: float
    rollout_only_share: float


@dataclass(frozen=True, slots=True)
class Fit:
    """`missed` says in one line how the row was missed, and is empty where it was not. `outside`
    names the free constants that would have to leave their interval; they are at its end. Where
    the row is missed and none is, the rounds were not enough."""

    values: dict[str, float]
    outside: tuple[str, ...]
    result: ModeResult
    missed: str


def fit(preset: Preset, row: Row, seed: int = 0) -> Fit:
    return conduct({"fit": fit_flow(preset, row, seed)}, 1, lambda name, job, result: None)["fit"]


def fit_flow(preset: Preset, row: Row, seed: int = 0) -> Flow[Fit]:
    """Move the free constants, inside their intervals, until sync takes as long as the row says."""
    bounds = {interval.key: interval for interval in INTERVALS}
    values = dict(FIRST)
    preset = replace(preset, num_steps=STEPS, warmup_steps=WARMUP)
    longest = float(preset.lengths.draw(np.array([1 - 1e-4])).max())  # of a batch, about
    (result,) = yield [Job(with_values(preset, values), Mode.SYNC, seed)]
    for _ in range(ROUNDS_MAX):
        if _is_close(result, row):
            return Fit(values, (), result, "")
        rollout_off, rest_off = _off(result, row)
        # The longest response pays the floor once per token; a step pays each of its updates.
        moves = (rollout_off / longest, rest_off / preset.updates_per_step)
        wanted = {key: values[key] - move for key, move in zip(FREE, moves, strict=True)}
        held = {k: min(max(v, bounds[k].low), bounds[k].high) for k, v in wanted.items()}
        if held == values:
            break
        values = held
        (result,) = yield [Job(with_values(preset, values), Mode.SYNC, seed)]
    if _is_close(result, row):
        return Fit(values, (), result, "")
    ends = tuple(k for k in FREE if values[k] in (bounds[k].low, bounds[k].high))
    return Fit(values, ends, result, _missed(result, row, ends))


def _is_close(result: ModeResult, row: Row) -> bool:
    return max(map(abs, _off(result, row))) < CLOSE_S


def _missed(result: ModeResult, row: Row, ends: tuple[str, ...]) -> str:
    rollout_off, rest_off = _off(result, row)
    why = f"at an end of its interval: {', '.join(ends)}" if ends else f"{ROUNDS_MAX} rounds made"
    off = f"rollout only {rollout_off:+.1f} s, rest {rest_off:+.1f} s"
    return f"the row was not reached ({why}): {off}"


def _off(result: ModeResult, row: Row) -> tuple[float, float]:
    """Seconds too much of rollout alone, and of the rest."""
    rollout_s = result.step_s * result.rollout_only_share
    wanted_s = row.step_s * row.rollout_only_share
    return rollout_s - wanted_s, (result.step_s - rollout_s) - (row.step_s - wanted_s)
