"""Freshness control on two CPU cores and on 64 simulated GPUs: what it costs, how fresh it is.

    python benchmarks/freshness.py --seeds 0 1 2 --json freshness.json

The arms of a recipe (without, with, and without at K = 1) run at the same time, so that whatever
else the machine does slows all of them alike: their ratios can be trusted, their speeds say nothing
of a machine that has only one of them. Speeds are trained tokens per second of the whole run: with
a long tail a slow step and a few quick ones take turns, so that a part of a run says little.
Staleness and waits are those between the first four and the last two steps, scores of the end.
Simulated rows run one after the other; their time does not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from dora_rl.io.append_log import read_lines
from dora_rl.sim.presets import PRESETS
from dora_rl.sim.run import run_mode
from dora_rl.types import Mode

RECIPES = Path(__file__).parent.parent / "recipes"
ARMS = {
    "off, K = 2": ("orchestration.freshness=off",),
    "auto, K = 2": ("orchestration.freshness=auto",),
    "off, K = 1": ("orchestration.freshness=off", "orchestration.max_staleness=1"),
}
FIRST, LAST = 4, 2  # steps of which staleness and waits are not counted
SPLITS = (28, 32, 40)  # of 64 GPUs, for generation
SEED = 1  # of the simulated rows

Row = dict[str, Any]


def together(recipe: str, seed: int, steps: int, folder: Path) -> list[Row]:
    """All arms of one recipe and seed at once."""
    runs: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    for place, (arm, changes) in enumerate(ARMS.items()):
        run_dir = folder / f"{recipe}-{seed}-{place}"
        command = [sys.executable, "-m", "dora_rl.cli", "train", str(RECIPES / f"{recipe}.toml")]
        command += [f"runtime.run_dir={run_dir}", f"runtime.seed={seed}", *changes]
        command += [f"orchestration.num_steps={steps}", f"evaluation.every_steps={steps}"]
        command += ["checkpoint.every_steps=0", "logging.progress=false"]
        log = run_dir.with_suffix(".out").open("wb")
        runs.append((arm, run_dir, subprocess.Popen(command, stdout=log, stderr=log)))
    for arm, run_dir, process in runs:
        if process.wait():
            raise SystemExit(f"{arm} failed: see {run_dir.with_suffix('.out')}")
    return [figures(recipe, arm, seed, run_dir) for arm, run_dir, _ in runs]


def figures(recipe: str, arm: str, seed: int, run_dir: Path) -> Row:
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    whole = [line for line in lines if "step" in line]
    steps = whole[FIRST:-LAST]
    scores = [line["eval/sampled"] for line in lines if "eval/sampled" in line]
    took_s = sum(line["time/step"] for line in steps)
    return {
        "recipe": recipe,
        "arm": arm,
        "seed": seed,
        "tokens_per_s": sum(line["tokens_trained"] for line in whole)
        / sum(line["time/step"] for line in whole),
        "staleness": mean(line["staleness/mean"] for line in steps),
        "waited": sum(line["time/wait_for_batch"] for line in steps) / took_s,
        "score": scores[-1] if scores else None,
    }


def simulated(steps: int) -> list[Row]:
    """The 64-GPU testbed, with rollout-bound, even and learner-bound splits."""
    rows: list[Row] = []
    for split in SPLITS:
        for arm, fresh in (("off, K = 2", False), ("auto, K = 2", True)):
            preset = replace(PRESETS["paper-64"], num_steps=steps, freshness=fresh)
            result = run_mode(preset, Mode.MULTI_VERSION, SEED, split)
            rows.append(
                {
                    "recipe": f"64 simulated GPUs, {split} + {64 - split}",
                    "arm": arm,
                    "seed": SEED,
                    "tokens_per_s": result.tokens_per_s,
                    "staleness": result.staleness_mean,
                    "waited": result.rollout_only_share,
                    "score": None,
                }
            )
    return rows


def table(rows: list[Row]) -> str:
    """One line for each recipe and arm; ratios are the mean of those within each seed."""
    heads = ["where", "arm", "tokens/s, ratio", "of the seeds", "staleness", "learner waits"]
    heads += ["score at the end"]
    lines = [heads, ["---"] * len(heads)]
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        here = [row for row in rows if row["recipe"] == recipe]
        base = {row["seed"]: row["tokens_per_s"] for row in here if row["arm"] == "off, K = 2"}
        for arm in dict.fromkeys(row["arm"] for row in here):
            mine = [row for row in here if row["arm"] == arm]
            ratios = [row["tokens_per_s"] / base[row["seed"]] for row in mine]
            scores = [row["score"] for row in mine if row["score"] is not None]
            lines.append(
                [
                    recipe,
                    arm,
                    f"{mean(ratios):.3f}",
                    " ".join(f"{ratio:.2f}" for ratio in ratios),
                    f"{mean(row['staleness'] for row in mine):.2f}",
                    f"{mean(row['waited'] for row in mine):.0%}",
                    f"{mean(scores):.3f}" if scores else "–",
                ]
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="freshness control: speed and staleness")
    parser.add_argument("--recipes", nargs="*", default=["quickstart", "longtail"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--sim-steps", type=int, default=16, help="0: nothing is simulated")
    parser.add_argument("--json", type=Path, help="rows that it has already are kept")
    args = parser.parse_args()
    rows: list[Row] = []
    if args.json is not None and args.json.exists():
        rows = json.loads(args.json.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for recipe in args.recipes:
            for seed in args.seeds:
                rows += together(recipe, seed, args.steps, Path(folder))
    rows += simulated(args.sim_steps) if args.sim_steps else []
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
