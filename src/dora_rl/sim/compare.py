"""`dora-rl sim`: the modes side by side on one preset.

Colocated modes run once. For the disaggregated ones the split is searched, with runs of full
length: the first steps are filled by the quickest groups and say little. Where a published
rollout-only share is known, the split that comes nearest to it is the main result (that is what
can be compared with the publication) and the best split stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dora_rl.sim.flows import (
    Flow,
    Job,
    See,
    balanced_split,
    best_of,
    conduct,
    nearest_to,
    search_split,
    splits_of,
)
from dora_rl.sim.presets import COLOCATED, Preset, world_spec
from dora_rl.sim.run import ModeResult
from dora_rl.types import Mode, UserError


@dataclass(frozen=True, slots=True)
class Outcome:
    """One mode. `best` is there when the split was searched; `searched` are all runs."""

    main: ModeResult
    matched: bool = False
    best: ModeResult | None = None
    searched: tuple[ModeResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    preset: Preset
    seed: int
    outcomes: dict[Mode, Outcome]


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """`split` fixes the rollout devices; `shares` are rollout-only shares to match."""

    seed: int = 0
    split: int | None = None
    shares: Mapping[Mode, float] | None = None
    num_workers: int = 1
    with_timeline: bool = False
    log: Path | None = None


def compare(
    preset: Preset, modes: Sequence[Mode], options: CompareOptions, see: See | None = None
) -> Comparison:
    """Run every mode. Wrong input is refused before the first run starts."""
    if options.log is not None and len(modes) != 1:
        raise UserError("an event log is of one run; choose one --mode for --log")
    if options.split is not None and all(mode in COLOCATED for mode in modes):
        raise UserError("--split is for one_step_off and multi_version; the other modes use all")
    for mode in modes:
        world_spec(preset, mode, options.seed, options.split).params.validate()
    flows = {mode.value: _flow(preset, mode, options) for mode in modes}
    found = conduct(flows, options.num_workers, see or (lambda name, job, result: None))
    return Comparison(preset, options.seed, {mode: found[mode.value] for mode in modes})


def _flow(preset: Preset, mode: Mode, options: CompareOptions) -> Flow[Outcome]:
    job = Job(preset, mode, options.seed, with_timeline=options.with_timeline)
    if mode in COLOCATED or options.split is not None:
        split = options.split if mode not in COLOCATED else None
        (result,) = yield [replace(job, rollout_devices=split, log=options.log)]
        return Outcome(result)
    share = (options.shares or {}).get(mode)
    tried = yield from search_split(
        splits_of(preset),
        balanced_split(preset),
        lambda split: replace(job, rollout_devices=split),
        share,
    )
    best = main = best_of(tried)[0]
    if share is not None:
        main = nearest_to(tried, share)[0]
    if options.log is not None:
        yield [replace(job, rollout_devices=main, log=options.log)]
    return Outcome(tried[main], share is not None, tried[best], tuple(tried.values()))
