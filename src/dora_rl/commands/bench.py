"""`dora-rl bench paradigms CONFIG --json FILE`: train with every mode and compare."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from dora_rl.commands.files import prepare_output, write_json
from dora_rl.types import UserError

SUMMARY = "train with every mode on the same cores and compare speed and learning"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("paradigms",), help="what to compare")
    parser.add_argument("config", type=Path, help="a TOML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--modes", default="all", help="all, or a comma-separated list")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N-1")
    parser.add_argument("--steps", type=int, default=0, help="of each run (default: the config's)")
    parser.add_argument(
        "--sweep-steps", type=int, default=24, help="of each run that looks for the best split"
    )
    parser.add_argument(
        "--split",
        metavar="IxT+L",
        help="I instances of T threads, learner with L; for all modes, instead of the sweep",
    )
    parser.add_argument("--cores", type=int, default=0, help="cores to use (default: all)")
    parser.add_argument("--eval-prompts", type=int, default=400, help="held-out prompts at the end")
    parser.add_argument("--ablations", action="store_true", help="also without single parts")
    parser.add_argument("--runs", type=Path, help="keep the run directories here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw bars")


def run(args: argparse.Namespace) -> int:
    for path in (args.json, args.picture):
        prepare_output(path)
    if args.runs is not None:
        return _compare(args, args.runs)
    with tempfile.TemporaryDirectory(prefix="dora-rl-bench-") as folder:
        return _compare(args, Path(folder))


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
    if args.seeds < 1:
        raise UserError("--seeds must be at least 1")
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
    if args.json is not None:
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
