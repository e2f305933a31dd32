"""The five paradigms on two CPU cores, three seeds: speed, learning, and the ratios.

    python benchmarks/paradigms.py --json paradigms.json --picture paradigms.png

Runs `dora-rl bench paradigms recipes/longtail.toml` on the first two cores, prints the table and
the ratios, and ends with status 1 if one of them is below its minimum. Every mode has its best
split from the stated sweep; sync uses both cores in both phases. Speeds are trained tokens per
second from the commit of the third step to the commit of the last step but K (start-up and drain
left out).
Needs a quiet machine: the load average is in the output, and above two it warns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dora_rl.cli import main as dora_rl

RECIPE = Path(__file__).parent.parent / "recipes" / "longtail.toml"
RATIOS_MIN = {"sync": 1.5, "one_step_off": 1.2, "partial": 1.0}
EVAL_NOISE = 0.03  # of held-out accuracy, beyond two standard errors of the seeds


def verdicts(result: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """(what, measured, required, reached) of every figure that has a minimum."""
    found = [
        (f"multi_version / {name}, tokens/s", result["ratios"][name], least, False)
        for name, least in RATIOS_MIN.items()
        if name in result["ratios"]
    ]
    found = [(what, value, least, value >= least) for what, value, least, _ in found]
    rows = {row["name"]: row for row in result["rows"]}
    if {"sync", "multi_version"} <= rows.keys():
        ours, theirs = (
            [run["eval"]["sampled"] for run in rows[name]["runs"]]
            for name in ("multi_version", "sync")
        )
        both = [*ours, *theirs]
        allowed = EVAL_NOISE + (2 * stdev(both) / len(both) ** 0.5 if len(both) > 1 else 0.0)
        gap = mean(ours) - mean(theirs)
        found.append(("held-out accuracy, multi_version - sync", gap, -allowed, gap >= -allowed))
        still = rows["multi_version"]["mean"]["still_ratio"]
        found.append(("share of the time in which something runs", 1 - still, 0.9, still <= 0.1))
    return found


def machine() -> dict[str, Any]:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    import torch

    return {
        "cpu": names[0] if names else "unknown",
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "load_1m_before": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the paradigms.")
    parser.add_argument("--config", type=Path, default=RECIPE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sweep-steps", type=int, default=24)
    parser.add_argument("--modes", default="all")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--no-ablations", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    about = machine()
    if about["load_1m_before"] > 2:
        print(f"warning: the load is {about['load_1m_before']:.1f}; figures will be noise")
    with tempfile.TemporaryDirectory() as folder:
        path = (args.json or Path(folder) / "paradigms.json").resolve()
        argv = ["bench", "paradigms", str(args.config.resolve()), "--json", str(path)]
        for name in ("modes", "seeds", "steps", "sweep_steps", "cores"):
            argv += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        argv += [] if args.no_ablations else ["--ablations"]
        argv += ["--picture", str(args.picture.resolve())] if args.picture else []
        os.chdir(RECIPE.parent.parent)  # recipes name their files from the repository's root
        status = dora_rl(argv)
        if status:
            return status
        result = json.loads(path.read_text())
        found = verdicts(result)
        for what, value, least, reached in found:
            print(
                f"{'reached' if reached else 'BELOW  '}  {what}: {value:.3f} (at least {least:.3f})"
            )
        result |= {"machine": about, "verdicts": [list(verdict) for verdict in found]}
        path.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(reached for *_, reached in found) else 1


if __name__ == "__main__":
    sys.exit(main())
