"""`dora-rl bench paradigms CONFIG --json FILE`: train with every mode and compare."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from dora_rl.commands.arguments import (
    JSON,
    OVERRIDES,
    argument,
    check_least,
    prepare_output,
    write_json,
)
from dora_rl.types import UserError

SUMMARY = "train with every mode on the same cores and compare speed and learning"


ARGUMENTS = (
    argument("what", choices=("paradigms",), help="what to compare"),
    argument("config", type=Path, help="a TOML file"),
    OVERRIDES,
    argument("--modes", default="all", help="all, or a comma-separated list"),
    argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N-1"),
    argument("--steps", type=int, default=0, help="of each run (default: the config's)"),
    argument(
        "--sweep-steps", type=int, default=24, help="of each run that looks for the best split"
    ),
    argument(
        "--split",
        metavar="IxT+L",
        help="I instances of T threads, learner with L; for all modes, instead of the sweep",
    ),
    argument("--cores", type=int, default=0, help="cores to use (default: all)"),
    argument("--eval-prompts", type=int, default=400, help="held-out prompts at the end"),
    argument("--ablations", action="store_true", help="also without single parts"),
    argument("--runs", type=Path, help="keep the run directories here"),
    JSON,
    argument("--picture", type=Path, metavar="FILE", help="draw bars"),
)


def run(args: argparse.Namespace) -> int:
    prepare_output(args.json, args.picture)
    with tempfile.TemporaryDirectory(prefix="dora-rl-bench-") as folder:
        return _compare(args, args.runs or Path(folder))


def _compare(args: argparse.Namespace, folder: Path) -> int:
    from dora_rl.bench.paradigms import (
        Bench,
        BenchOptions,
        draw_bench,
        ratio_lines,
        ratios,
        tables_of,
    )
    from dora_rl.commands.progress import console
    from dora_rl.commands.sim import modes_of
    from dora_rl.setup.settings import load_config

    config = load_config(args.config, args.overrides)
    check_least(args, 1, "seeds")
    options = BenchOptions(
        modes=modes_of(args.modes),
        seeds=range(args.seeds),
        num_steps=args.steps or config.orchestration.num_steps,
        sweep_steps=args.sweep_steps,
        folder=folder,
        ablations=args.ablations,
        num_eval_prompts=args.eval_prompts,
        num_cores=args.cores,
        split=_split(args.split) if args.split else None,
    )
    result = Bench(config, options, _see).run()
    result |= {"config": str(args.config), "overrides": args.overrides, "ratios": ratios(result)}
    out = console()
    out.print(*tables_of(result))
    for line in ratio_lines(result):
        out.print(line, highlight=False)
    write_json(args.json, result)
    if args.picture is not None:
        draw_bench(result, args.picture)
    return 0


def _split(text: str) -> Any:
    from dora_rl.bench.paradigms import Split

    try:
        instances, _, rest = text.partition("x")
        threads, _, learner = rest.partition("+")
        split = Split(int(instances), int(threads), int(learner))
    except ValueError:
        raise UserError(f"--split {text!r}: write IxT+L, for example 2x1+1") from None
    if min(split.num_instances, split.threads, split.learner_threads) < 1:
        raise UserError(f"--split {text!r}: each number must be at least 1")
    return split


def _see(name: str, figures: dict[str, Any]) -> None:
    text = f"{name}: {figures['tokens_per_s']:.0f} tokens/s"
    if "eval" in figures:
        greedy = figures["eval"]["greedy"]
        text += f", held-out greedy {'failed' if greedy is None else f'{greedy:.3f}'}"
    idle = figures.get("device_idle_ratio")
    text += f", {figures['cpu_unused_ratio']:.0%} of the CPU time not used"
    print(text if idle is None else f"{text}, the GPU idle {idle:.0%} of the time", flush=True)
