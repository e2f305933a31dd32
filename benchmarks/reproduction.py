"""The figures of docs/reproduction.md: the fit, paper against simulation, predictions, ablations.

    python benchmarks/reproduction.py --constants
    python benchmarks/reproduction.py --fit
    python benchmarks/reproduction.py --json reproduction.json

Prints markdown, table by table. The split of a disaggregated mode is searched once per GPU count,
with seed 0; the other seeds, the ablations and the other sets of constants run on the split that
was found. Each set of constants is drawn from the intervals of `sim/constants.py` and then fitted
as the committed one was; sets whose fit misses the row are counted, named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dora_rl.sim.compare import (
    CompareOptions,
    Comparison,
    Flow,
    Job,
    balanced_split,
    best_of,
    compare,
    conduct,
    search_split,
    splits_of,
)
from dora_rl.sim.constants import FIRST, INTERVALS, draws, value_of, with_values
from dora_rl.sim.fit import Fit, Row, fit, fit_flow
from dora_rl.sim.presets import COLOCATED, PRESETS, Preset, scaled
from dora_rl.sim.report import (
    PAPER,
    as_json,
    published,
    published_shares,
    row_split,
    rows_of,
    split_text,
)
from dora_rl.sim.run import ModeResult
from dora_rl.types import Mode

ABLATIONS = {
    "all on": {},
    "no KV moves (re-prefill)": {"kv_moves": False},
    "no repartition": {"repartition": False},
    "no streaming into a running step": {"streaming": False},
}


def sync_row() -> Row:
    """All that is ever fitted to."""
    known = PAPER["paper-64", 64][Mode.SYNC]
    return Row(known.step_s, known.rollout_only_share)


def fit_table(found: Fit) -> str:
    rows = [[key, f"{value:.3g}"] for key, value in found.values.items()]
    result = found.result
    said = f"sync: {result.step_s / 60:.2f} min, rollout only {result.rollout_only_share:.1%}"
    missed = f"\n\n{found.missed}" if found.missed else ""
    return table(["free constant", "fitted"], rows) + f"\n\n{said}{missed}"


MODES = (Mode.SYNC, Mode.ONE_STEP_OFF, Mode.PARTIAL, Mode.MULTI_VERSION)
STEPS = 10  # 3 fill, K are left out at the end
SET_STEPS = 8  # with each set of constants
Splits: TypeAlias = dict[int, dict[Mode, int]]  # by number of GPUs: of the modes that have one


def searched(preset: Preset, workers: int) -> Comparison:
    options = CompareOptions(shares=published_shares(preset), num_workers=workers)
    return compare(preset, MODES, options, tell)


def tell(name: str, job: Job, result: ModeResult) -> None:
    print(f"{time.strftime('%X')} {job.preset.num_devices} GPUs, seed {job.seed}: {name} ", end="")
    print(f"{split_text(result)}: {result.step_s / 60:.2f} min", flush=True)


def seeds_of(
    comparison: Comparison, seeds: Sequence[int], workers: int
) -> dict[Mode, list[ModeResult]]:
    """Every mode on its shown split, with other seeds."""

    def flow(mode: Mode) -> Flow[list[ModeResult]]:
        main = comparison.outcomes[mode].main
        results = yield [Job(comparison.preset, mode, s, main.split["rollout"]) for s in seeds]
        return [main, *results]

    found = conduct({mode.value: flow(mode) for mode in comparison.outcomes}, workers, tell)
    return {mode: found[mode.value] for mode in comparison.outcomes}


def ablations(
    comparison: Comparison, seeds: Sequence[int], workers: int
) -> dict[str, list[ModeResult]]:
    split = comparison.outcomes[Mode.MULTI_VERSION].main.split["rollout"]

    def flow(changes: dict[str, bool]) -> Flow[list[ModeResult]]:
        preset = replace(comparison.preset, **changes)
        jobs = [Job(preset, Mode.MULTI_VERSION, seed, split) for seed in seeds]
        results = yield jobs
        return results

    return conduct({name: flow(changes) for name, changes in ABLATIONS.items()}, workers, tell)


def constants_table() -> str:
    """Every constant that has an interval; free ones are marked."""
    preset = PRESETS["paper-64"]
    rows: list[list[str]] = []
    for interval in INTERVALS:
        value, first = value_of(preset, interval.key), FIRST.get(interval.key)
        shown = f"{round(value, 6):g}" if first is None else f"**{value:g}** (first {first:g})"
        bounds = f"{interval.low:g} – {interval.high:g}"
        if interval.choices:
            bounds = ", ".join(map(str, interval.choices))
        rows.append([f"`{interval.key}`", shown, bounds, interval.source])
    return table(["constant", "value", "interval", "why"], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def paper_table(comparison: Comparison, others: dict[Mode, list[ModeResult]]) -> str:
    heads = ["mode", "split", "step, min: paper", "simulated", "difference", "over seeds"]
    heads += ["rollout only: paper", "simulated", "tokens/s: paper", "simulated", "difference"]
    rows: list[list[str]] = []
    paper = published(comparison.preset)
    for row in rows_of(comparison):
        result, known = row.result, paper.get(row.mode)
        shown = result is comparison.outcomes[row.mode].main
        known = known if shown else None
        minutes = sorted(r.step_s / 60 for r in others[row.mode]) if shown else []
        rows.append(
            [
                row.mode.value,
                row_split(row),
                f"{known.step_s / 60:.2f}" if known else "–",
                f"{result.step_s / 60:.2f}",
                f"{result.step_s / known.step_s - 1:+.1%}" if known else "–",
                f"{minutes[0]:.2f}–{minutes[-1]:.2f}" if minutes else "–",
                f"{known.rollout_only_share:.0%}" if known else "–",
                f"{result.rollout_only_share:.0%}",
                f"{known.tokens_per_s:,.0f}" if known else "–",
                f"{result.tokens_per_s:,.0f}",
                f"{result.tokens_per_s / known.tokens_per_s - 1:+.1%}" if known else "–",
            ]
        )
    return table(heads, rows)


def cost_cells(result: ModeResult) -> list[str]:
    return [
        f"{result.instance_idle_ratio:.1%}",
        f"{result.trainer_idle_ratio:.1%}",
        f"{result.staleness_mean:.2f}",
        str(result.staleness_max),
        f"{result.mixed_version_frac:.1%}",
        f"{result.discarded_tokens / 1e6:.1f} M",
        f"{result.length_bias:.2f}",
        f"{result.migrations:,}",
        f"{result.kv_bytes_moved / 1e12:.1f} TB",
        *(f"{result.overheads[name]:.2%}" for name in OVERHEADS),
    ]


OVERHEADS = ("load", "transfer", "prefill_again")
COSTS = ["instances idle", "trainer idle", "staleness mean", "max", "mixed", "discarded"]
COSTS += ["length bias", "moves", "KV moved", "weight loads", "KV transfer", "prefill again"]


def cost_table(comparison: Comparison) -> str:
    rows = [
        [row.mode.value, split_text(row.result), *cost_cells(row.result)]
        for row in rows_of(comparison)
    ]
    return table(["mode", "split", *COSTS], rows)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One set of constants: what the free ones became, and minutes a step by size and mode."""

    values: dict[str, float]
    missed: str
    minutes: dict[int, dict[str, float]]


def drawn_flow(values: dict[str, float], steps: int, splits: Splits) -> Flow[Drawn]:
    """Fit the free constants beside these values, then predict with them."""
    preset = with_values(PRESETS["paper-64"], values)
    found = yield from fit_flow(preset, sync_row())
    if found.missed:
        return Drawn(values | found.values, found.missed, {})
    preset = replace(with_values(preset, found.values), num_steps=steps)
    places = [(gpus, mode) for gpus in splits for mode in MODES]
    jobs: list[Job] = []
    for gpus, mode in places:
        sized, split = scaled(preset, gpus, 1.0), splits[gpus].get(mode)
        if split is not None:  # whole instances, which may be larger here
            size = preset.tensor_parallel
            split = min(max(size, round(split / size) * size), gpus - size)
        jobs.append(Job(sized, mode, 0, split))
    results = yield jobs
    minutes: dict[int, dict[str, float]] = {gpus: {} for gpus in splits}
    for (gpus, mode), result in zip(places, results, strict=True):
        minutes[gpus][mode.value] = result.step_s / 60
    return Drawn(values | found.values, "", minutes)


def drawn(num: int, steps: int, splits: Splits, workers: int) -> list[Drawn]:
    sets = {f"set {place}": values for place, values in enumerate(draws(num))}
    flows = {name: drawn_flow(values, steps, splits) for name, values in sets.items()}
    return list(conduct(flows, workers, tell).values())


def told(sets: Sequence[Drawn]) -> str:
    """How many sets could not be fitted, and why each was not, a line for each."""
    missed = [one.missed for one in sets if one.missed]
    said = f"{len(missed)} of {len(sets)} sets of constants could not be fitted and are left out"
    return "\n".join([said, *(f"- {why}" for why in missed)])


def splits_found(comparisons: Sequence[Comparison]) -> Splits:
    modes = [mode for mode in MODES if mode not in COLOCATED]
    return {
        comparison.preset.num_devices: {mode: best_split(comparison, mode) for mode in modes}
        for comparison in comparisons
    }


def best_split(comparison: Comparison, mode: Mode) -> int:
    outcome = comparison.outcomes[mode]
    return (outcome.best or outcome.main).split["rollout"]


def spread(found: Sequence[Drawn], gpus: int, mode: Mode) -> str:
    """From the 10 % to the 90 % quantile."""
    minutes = [one.minutes[gpus][mode.value] for one in found if gpus in one.minutes]
    if len(minutes) < 2:
        return "–"
    low, high = np.quantile(minutes, [0.1, 0.9])
    return f"{low:.1f}–{high:.1f}"


def prediction_table(comparisons: Sequence[Comparison], found: Sequence[Drawn]) -> str:
    """The best split of every mode; only these are comparable between sizes."""
    rows: list[list[str]] = []
    for comparison in comparisons:
        preset, sync = comparison.preset, comparison.outcomes[Mode.SYNC].main.step_s
        for mode, outcome in comparison.outcomes.items():
            result = outcome.best or outcome.main
            rows.append(
                [
                    str(preset.num_devices),
                    mode.value,
                    split_text(result),
                    f"{result.step_s / 60:.2f}",
                    spread(found, preset.num_devices, mode),
                    f"{result.rollout_only_share:.0%}",
                    f"{result.tokens_per_s:,.0f}",
                    f"{result.tokens_per_s / preset.num_devices:,.0f}",
                    f"{sync / result.step_s:.2f}",
                    f"{result.staleness_mean:.2f}",
                ]
            )
    heads = ["GPUs", "mode", "split", "step, min", "10–90 %", "rollout only", "tokens/s"]
    return table([*heads, "per GPU", "× sync", "staleness"], rows)


BEYOND = {
    "DORA as in the paper": {},
    "+ freshness": {"freshness": True},
    "+ speculation": {"freshness": True, "speculation": True},
}


def beyond_table(preset: Preset, sizes: Sequence[int], seeds: Sequence[int], workers: int) -> str:
    """Each row at its own best split, then with all seeds."""

    def flow(gpus: int, changes: dict[str, bool]) -> Flow[list[ModeResult]]:
        changed = replace(scaled(preset, gpus, 1.0), **changes)
        job = Job(changed, Mode.MULTI_VERSION, seeds[0])
        tried = yield from search_split(
            splits_of(changed),
            balanced_split(changed),
            lambda split: replace(job, rollout_devices=split),
        )
        best = best_of(tried)[0]
        results = yield [replace(job, seed=seed, rollout_devices=best) for seed in seeds]
        return results

    flows = {f"{gpus} {name}": flow(gpus, BEYOND[name]) for gpus in sizes for name in BEYOND}
    found = conduct(flows, workers, tell)
    rows: list[list[str]] = []
    for name, results in found.items():
        gpus, _, what = name.partition(" ")
        first = mean(found[f"{gpus} {next(iter(BEYOND))}"], "tokens_per_s")
        rate = mean(results, "tokens_per_s")
        rows.append(
            [
                gpus,
                what,
                split_text(results[0]),
                f"{mean(results, 'step_s') / 60:.2f}",
                f"{rate:,.0f}",
                f"{rate / first:.2f}",
                f"{mean(results, 'staleness_mean'):.2f}",
                f"{mean(results, 'rollout_only_share'):.0%}",
            ]
        )
    heads = ["simulated GPUs", "", "split", "step, min", "tokens/s", "×", "staleness"]
    return table([*heads, "rollout only"], rows)


def mean(results: Sequence[ModeResult], name: str) -> float:
    return sum(getattr(result, name) for result in results) / len(results)


def ablation_table(found: dict[str, list[ModeResult]]) -> str:
    full = mean(found["all on"], "step_s")
    rows: list[list[str]] = []
    for name, results in found.items():
        minutes = sorted(result.step_s / 60 for result in results)
        step_s = mean(results, "step_s")
        shares = [sum(r.overheads[part] for r in results) / len(results) for part in OVERHEADS]
        rows.append(
            [
                name,
                f"{step_s / 60:.2f}",
                f"{minutes[0]:.2f}–{minutes[-1]:.2f}",
                f"{step_s / full - 1:+.1%}",
                f"{mean(results, 'rollout_only_share'):.0%}",
                f"{mean(results, 'tokens_per_s'):,.0f}",
                f"{mean(results, 'staleness_mean'):.2f}",
                f"{mean(results, 'migrations') / results[0].steps_measured:,.0f}",
                *(f"{share:.2%}" for share in shares),
            ]
        )
    heads = ["multi_version", "step, min", "over seeds", "difference", "rollout only", "tokens/s"]
    heads += ["staleness", "moves a step", "weight loads", "KV transfer", "prefill again"]
    return table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="the figures of docs/reproduction.md")
    parser.add_argument("--fit", action="store_true", help="only the free constants, from sync")
    parser.add_argument("--constants", action="store_true", help="only their table")
    parser.add_argument("--gpus", type=int, nargs="*", default=[16, 32, 64, 128, 256, 1024, 4096])
    parser.add_argument("--beyond", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sets", type=int, default=6, help="of constants, for the uncertainty")
    parser.add_argument("--spread", type=int, nargs="*", default=[16, 64, 256, 4096])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.constants:
        print(constants_table())
        return
    if args.fit:
        print(fit_table(fit(PRESETS["paper-64"], sync_row())))
        return
    document: dict[str, Any] = {}

    def keep(name: str, figures: Any, *tables: str) -> None:
        document[name] = figures
        print("", *tables, sep="\n\n", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(document, indent=2) + "\n")

    preset = replace(PRESETS["paper-64"], num_steps=args.steps)
    base = searched(preset, args.workers)
    others = seeds_of(base, args.seeds, args.workers)
    seeds = {mode: [r.as_json() for r in results] for mode, results in others.items()}
    keep("comparison", as_json(base), paper_table(base, others), cost_table(base))
    keep("seeds", seeds)
    every = [base.seed, *args.seeds]
    keep("beyond", None, beyond_table(preset, args.beyond, every, args.workers))
    predicted: list[Comparison] = []
    for gpus in args.gpus:
        known = gpus == preset.num_devices
        predicted.append(base if known else searched(scaled(preset, gpus, 1.0), args.workers))
        found = [as_json(comparison) for comparison in predicted]
        keep("predictions", found, prediction_table(predicted, []))
    measured = [one for one in predicted if one.preset.num_devices in args.spread]
    sets = drawn(args.sets, SET_STEPS, splits_found(measured), args.workers)
    keep("sets", [asdict(one) for one in sets], told(sets), prediction_table(predicted, sets))
    ablated = ablations(base, every, args.workers)
    figures = {name: [r.as_json() for r in results] for name, results in ablated.items()}
    keep("ablations", figures, ablation_table(ablated))


if __name__ == "__main__":
    main()
