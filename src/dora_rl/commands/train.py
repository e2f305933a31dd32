"""`dora-rl train CONFIG.toml a.b=c --resume --dry-run`: train on this machine."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path
from typing import Any

from dora_rl.types import UserError

SUMMARY = "train a model: dora-rl train CONFIG.toml section.key=value ..."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a TOML file, or the config.json of a run")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--resume", action="store_true", help="go on with the run directory's run")
    parser.add_argument("--dry-run", action="store_true", help="check everything, start nothing")


def run(args: argparse.Namespace) -> int:
    from dora_rl.runtime.prepare import prepare
    from dora_rl.runtime.settings import load_config

    config = load_config(args.config, args.overrides)
    prepared = prepare(config)
    if args.dry_run:
        for line in prepared.describe():
            print(line)
        return 0
    run_dir = Path(config.runtime.run_dir)
    if args.resume and not (run_dir / "events").is_dir():
        raise UserError(f"{run_dir} holds no run to resume")
    if not args.resume and (run_dir / "events").is_dir():
        raise UserError(
            f"{run_dir} already holds a run; add --resume, or set runtime.run_dir=DIRECTORY"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(config.model_dump_json(indent=1))
    summary, done, reason = _train(prepared, resume=args.resume)
    _report(run_dir, summary, reason)
    return 0 if done else 3


def _train(prepared: Any, *, resume: bool) -> tuple[dict[str, Any], bool, str]:
    from dora_rl.commands.train_progress import Progress
    from dora_rl.runtime.local import LocalRun

    interrupted = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt  # the second one, at once
        interrupted.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    config = prepared.config
    local = LocalRun(
        config,
        prepared.layout,
        prepared.train,
        prepared.evaluation,
        prepared.decode,
        resume=resume,
    )
    progress = Progress(local, show=config.logging.progress)
    with progress:
        try:
            stop = local.run(interrupted.is_set)
        finally:
            summary = local.close()
    return summary, stop.done, stop.reason


def _report(run_dir: Path, summary: dict[str, Any], reason: str) -> None:
    from dora_rl.observe.plots import draw_run

    print(f"{reason}: {summary['steps']} steps in {summary['wall_s']:.0f} s")
    first, last = summary["eval_first"], summary["eval_last"]
    if first and last:
        for name in ("sampled", "greedy", "tail_sampled", "tail_greedy"):
            print(f"  held-out {name:13} {first[name]:.3f} -> {last[name]:.3f}")
    print(
        f"  staleness mean {summary['staleness_mean']:.2f} max {summary['staleness_max']}, "
        f"mixed versions {summary['mixed_version_frac']:g}, "
        f"discarded tokens {summary['discarded_tokens']}, "
        f"{summary['tokens_per_s']:.0f} tokens/s"
    )
    picture = draw_run(run_dir)
    print(f"look at  {run_dir}/summary.json  metrics.jsonl  rollouts.jsonl  {picture.name}")
    print(f"prove it dora-rl audit {run_dir}")
