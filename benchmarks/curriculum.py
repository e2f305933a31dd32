"""A curriculum on two CPU cores: groups that told nothing, and what was learned for the tokens.

    python benchmarks/curriculum.py --seeds 0 1 2 --json curriculum.json

Runs `recipes/mixed.toml` without and with its curriculum, both at the same time. Each step trains
as many groups in both, so that what differs is how many had to be generated for them. `gain` is
held-out sampled accuracy after less before. Ends with status 1 if with the curriculum more groups
were left out, or less was learned for each token, in the mean of the seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.io.append_log import read_lines
from dora_rl.observe.eventlog import Entry, read

RECIPE = Path(__file__).parent.parent / "recipes" / "mixed.toml"
ARMS = ("off", "pools")

Row = dict[str, Any]


def together(seed: int, changes: list[str], folder: Path) -> list[Row]:
    """Both arms of one seed at once."""
    runs: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    for arm in ARMS:
        run_dir = folder / f"{arm}-{seed}"
        command = [sys.executable, "-m", "dora_rl.cli", "train", str(RECIPE)]
        command += [f"runtime.run_dir={run_dir}", f"runtime.seed={seed}", f"data.seed={seed}"]
        command += [f"data.curriculum={arm}", "logging.progress=false", *changes]
        log = run_dir.with_suffix(".out").open("wb")
        runs.append((arm, run_dir, subprocess.Popen(command, stdout=log, stderr=log)))
    for arm, run_dir, process in runs:
        if process.wait():
            raise SystemExit(f"{arm} failed: {run_dir.with_suffix('.out').read_text()}")
    return [figures(arm, seed, run_dir) for arm, run_dir, _ in runs]


def figures(arm: str, seed: int, run_dir: Path) -> Row:
    """From the log: how groups ended, and every token that was generated."""
    ends: Counter[str] = Counter()
    num_tokens = 0
    for entry in read(run_dir / "events"):
        if not isinstance(entry, Entry):
            continue
        if isinstance(entry.event, ev.SampleFinished):
            num_tokens += entry.event.num_tokens
        ends.update(a.end.value for a in entry.actions if isinstance(a, act.EndGroup))
    lines = read_lines(run_dir / "metrics.jsonl")
    scores = [line["eval/sampled"] for line in lines if "eval/sampled" in line]
    gain = scores[-1] - scores[0]
    return {
        "arm": arm,
        "seed": seed,
        "trained": ends["trained"],
        "filtered": ends["filtered"],
        "tokens": num_tokens,
        "before": scores[0],
        "after": scores[-1],
        "gain_per_mtoken": gain / num_tokens * 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="What a curriculum saves.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of both arms")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            rows += together(seed, args.set, Path(folder))
            for row in rows[-len(ARMS) :]:
                print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    off, on = ([row for row in rows if row["arm"] == arm] for arm in ARMS)
    filtered, learned = (
        mean(row[name] for row in on) / mean(row[name] for row in off)
        for name in ("filtered", "gain_per_mtoken")
    )
    print(f"with / without: groups left out {filtered:.2f}, accuracy per token {learned:.2f}")
    return 0 if filtered < 1 < learned else 1


if __name__ == "__main__":
    raise SystemExit(main())
