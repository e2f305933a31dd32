"""`dora-rl sim` and `plan` compare modes and splits in simulation, `bench` compares real runs."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from dora_rl.commands.arguments import (
    JSON,
    OVERRIDES,
    argument,
    at_least,
    command,
    prepare_output,
    write_json,
)
from dora_rl.types import Mode, UserError
from dora_rl.user_code import hint, require

# Which testbed `sim` and `plan` simulate, how many GPUs, what is changed in it.
TESTBED = (
    argument(
        "preset",
        metavar="PRESET|CONFIG|RUN",
        help="testbed: paper-64, moe-agentic, small, …; or a configuration file, or a run, whose "
        "lengths are then those that it trained",
    ),
    argument(
        "--gpus", type=at_least(1), metavar="N", help="number of GPUs; the batch stays as it is"
    ),
    argument(
        "--seed", type=int, metavar="N", default=0, help="of the response lengths (default 0)"
    ),
    argument("--steps", type=at_least(1), metavar="N", help="training steps to simulate"),
    argument("--batch-scale", type=float, metavar="X", default=1.0, help="scale the batch by this"),
    argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field of the preset: max_staleness=3, device.nic_bytes_per_s=25e9, "
        "lengths=lognormal:MEAN,SIGMA,MAX | pareto:ALPHA,MIN,MAX | file:PATH, …",
    ),
    argument("--no-kv-moves", action="store_true", help="re-prefill instead of moving"),
    argument("--no-repartition", action="store_true", help="no proportional partition"),
    argument("--no-streaming", action="store_true", help="train on whole batches only"),
    argument(
        "--jobs", type=at_least(1), metavar="N", help="simulations at once (default: one per core)"
    ),
)


def modes_of(text: str) -> list[Mode]:
    """`all`, or a comma-separated list, in the order of the enumeration."""
    if text == "all":
        return list(Mode)
    wanted = [_mode(name.strip()) for name in text.split(",")]
    return [mode for mode in Mode if mode in wanted]


def _mode(name: str) -> Mode:
    require((name in list(Mode), f"unknown mode {name!r}{hint(name, ['all', *Mode])}"))
    return Mode(name)


def shares_of(texts: list[str]) -> dict[Mode, float]:
    shares: dict[Mode, float] = {}
    for text in texts:
        name, _, share = text.partition("=")
        try:
            shares[_mode(name)] = float(share)
        except ValueError:
            raise UserError(
                f"--match {text!r}: write MODE=SHARE, for example {name}=0.33"
            ) from None
        require((0 <= shares[_mode(name)] <= 1, f"--match {text!r}: a share is from 0 to 1"))
    return shares


@command(
    "compare the modes on a testbed, in simulation",
    *TESTBED,
    argument("--mode", default="all", help="all, or one or more of " + ", ".join(Mode)),
    argument(
        "--split", type=int, metavar="N", help="GPUs that generate (default: search the best)"
    ),
    argument(
        "--match",
        action="append",
        default=[],
        metavar="MODE=SHARE",
        help="search the split with this rollout-only share instead, for example one_step_off=0.33",
    ),
    JSON,
    argument("--picture", type=Path, metavar="FILE", help="draw bars and a Gantt chart"),
    argument("--log", type=Path, metavar="DIR", help="write the event log of the mode"),
)
def sim(args: argparse.Namespace) -> int:
    from dora_rl.commands.progress import console, showing_runs
    from dora_rl.commands.testbed import preset_of, workers_of
    from dora_rl.sim.compare import CompareOptions, compare
    from dora_rl.sim.report import as_json, promise_table, published_shares, speed_table

    modes, preset = modes_of(args.mode), preset_of(args)
    prepare_output(args.json, args.picture)
    if args.picture is not None:
        from dora_rl.observe.plots import check_format

        check_format(args.picture)
    options = CompareOptions(
        seed=args.seed,
        split=args.split,
        shares=published_shares(preset) | shares_of(args.match),
        num_workers=workers_of(args),
        with_timeline=args.picture is not None,
        log=args.log / "events" if args.log is not None else None,
    )
    with showing_runs([mode.value for mode in modes]) as see:
        comparison = compare(preset, modes, options, see)
    out = console()
    out.print(speed_table(comparison), promise_table(comparison))
    write_json(args.json, as_json(comparison))
    if args.picture is not None:
        from dora_rl.sim.picture import draw

        draw(comparison, args.picture)
    for path in filter(None, (args.json, args.picture, args.log)):
        out.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return 0


@command(
    "search split, staleness bound and groups in flight for the best throughput",
    *TESTBED,
    argument("--json", type=Path, metavar="FILE", help="write the plan"),
)
def plan(args: argparse.Namespace) -> int:
    from dora_rl.commands.progress import console, showing_runs
    from dora_rl.commands.testbed import preset_of, workers_of
    from dora_rl.sim.plan import plan as search
    from dora_rl.sim.plan import plan_table

    preset = preset_of(args)
    prepare_output(args.json)
    with showing_runs(["plan"]) as see:
        result = search(preset, seed=args.seed, num_workers=workers_of(args), see=see)
    out = console()
    out.print(plan_table(result))
    for line in result.reasons:
        out.print(line, highlight=False)
    write_json(args.json, result.as_json())
    if args.json is not None:
        out.print(f"wrote {args.json}", highlight=False, soft_wrap=True)
    return 0


@command(
    "train with every mode on the same cores and compare speed and learning",
    argument("what", choices=("paradigms",), help="what to compare"),
    argument("config", type=Path, help="a TOML file"),
    OVERRIDES,
    argument("--modes", default="all", help="all, or a comma-separated list"),
    argument("--seeds", type=at_least(1), default=1, metavar="N", help="seeds 0 to N-1"),
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
def bench(args: argparse.Namespace) -> int:
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
    from dora_rl.setup.settings import load_config

    config = load_config(args.config, args.overrides)
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

    parts = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
    if parts is None:
        raise UserError(f"--split {text!r}: write IxT+L, for example 2x1+1")
    split = Split(*map(int, parts.groups()))
    require(
        (
            min(split.num_instances, split.threads, split.learner_threads) >= 1,
            f"--split {text!r}: each number must be at least 1",
        )
    )
    return split


def _see(name: str, figures: dict[str, Any]) -> None:
    text = f"{name}: {figures['tokens_per_s']:.0f} tokens/s"
    if "eval" in figures:
        greedy = figures["eval"]["greedy"]
        text += f", held-out greedy {'failed' if greedy is None else f'{greedy:.3f}'}"
    idle = figures.get("device_idle_ratio")
    text += f", {figures['cpu_unused_ratio']:.0%} of the CPU time not used"
    print(text if idle is None else f"{text}, the GPU idle {idle:.0%} of the time", flush=True)
