"""The figures of docs/reproduction.md: paper against simulation, other GPU counts, ablations.

    python benchmarks/reproduction.py --json reproduction.json

Prints markdown, table by table. The split of a disaggregated mode is searched once per GPU count,
with seed 0; the other seeds and the ablations run on the split that was found. More steps than the
preset has are simulated: stragglers come due in cycles of a few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dora_rl.sim.compare import CompareOptions, Comparison, Flow, Job, compare, conduct
from dora_rl.sim.fit import Fit, Row, fit
from dora_rl.sim.presets import PRESETS, Preset, scaled
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
    missed = f"; at an end of its interval: {', '.join(found.outside)}" if found.outside else ""
    return table(["free constant", "fitted"], rows) + f"\n\n{said}{missed}"


def searched(preset: Preset, workers: int) -> Comparison:
    options = CompareOptions(shares=published_shares(preset), num_workers=workers)
    return compare(preset, list(Mode), options, tell)


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


def prediction_table(comparisons: Sequence[Comparison]) -> str:
    rows: list[list[str]] = []
    for comparison in comparisons:
        sync = comparison.outcomes[Mode.SYNC].main.step_s
        for row in rows_of(comparison):
            result = row.result
            rows.append(
                [
                    str(comparison.preset.num_devices),
                    row.mode.value,
                    row_split(row),
                    f"{result.step_s / 60:.2f}",
                    f"{result.rollout_only_share:.0%}",
                    f"{result.tokens_per_s:,.0f}",
                    f"{sync / result.step_s:.2f}",
                    f"{result.staleness_mean:.2f}",
                ]
            )
    heads = ["GPUs", "mode", "split", "step, min", "rollout only", "tokens/s", "speed-up"]
    return table([*heads, "staleness"], rows)


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
    parser.add_argument("--gpus", type=int, nargs="*", default=[32, 128, 256])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fit", action="store_true", help="only the free constants, from sync")
    args = parser.parse_args()
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
    ablated = ablations(base, [base.seed, *args.seeds], args.workers)
    figures = {name: [r.as_json() for r in results] for name, results in ablated.items()}
    keep("ablations", figures, ablation_table(ablated))
    predicted: list[Comparison] = []
    for gpus in args.gpus:
        predicted.append(searched(scaled(preset, gpus, 1.0), args.workers))
        found = [as_json(comparison) for comparison in predicted]
        keep("predictions", found, prediction_table(predicted))


if __name__ == "__main__":
    main()
