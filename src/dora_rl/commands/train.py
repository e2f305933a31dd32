"""`dora-rl train CONFIG.toml a.b=c --resume --dry-run`: train on this machine.

Exit status: 0 all steps are trained, 2 the input is wrong, 3 stopped and resumable, 4 all steps are
done and every update was skipped as non-finite, 130 cut off by a second signal (resumable too). A
run whose every gradient was zero says so: it did what it was told, and learned nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.commands.arguments import OVERRIDES, argument

if TYPE_CHECKING:
    from dora_rl.setup.prepare import Prepared
    from dora_rl.workers.fork_server import ForkServer

SUMMARY = "train a model: dora-rl train CONFIG.toml section.key=value ..."
STOPPED = 3
NOTHING_LEARNED = 4
ASIDE_SHOWN = 5


ARGUMENTS = (
    argument("config", type=Path, help="a TOML file, or the config.json of a run"),
    OVERRIDES,
    argument("--resume", action="store_true", help="go on with the run directory's run"),
    argument("--dry-run", action="store_true", help="check everything, start nothing"),
)


def run(args: argparse.Namespace) -> int:
    from dora_rl.controller.resume import (
        check_not_moved,
        check_run_dir,
        check_same_data,
        check_same_run,
        make_run_dir,
    )
    from dora_rl.setup.prepare import check_answers, prepare
    from dora_rl.setup.settings import load_config
    from dora_rl.workers.pool import begin_server
    from dora_rl.worlds.kinds import check_kind

    config = load_config(args.config, args.overrides)
    run_dir = Path(config.runtime.run_dir)
    check_kind(config)
    if args.resume and not any(word.startswith("runtime.run_dir=") for word in args.overrides):
        check_not_moved(args.config, run_dir)
    check_run_dir(run_dir, resume=args.resume)
    if args.resume:
        check_same_run(config, run_dir)
    with contextlib.ExitStack() as until_the_end:
        # It imports for the workers while the run is prepared.
        server = None if args.dry_run else begin_server(config)
        if server is not None:
            until_the_end.callback(server.close)
        prepared = prepare(config)
        prepared.check_memory()
        if not args.resume:  # a run of an older release, which did not look, goes on
            check_answers(prepared.config, prepared.train, prepared.evaluation)
        if args.dry_run:
            print(*prepared.describe(), sep="\n")
            return 0
        make_run_dir(run_dir)
        check_same_data(prepared.train, run_dir)
        summary, done, reason = _train(prepared, server, resume=args.resume)
    if summary.get("updates_skipped"):
        print(f"dora-rl: {_skipped(summary)}", file=sys.stderr)
    if summary.get("num_user_errors"):
        print(
            f"your code raised {summary['num_user_errors']} times; tracebacks in "
            f"{run_dir}/user_errors.log",
            file=sys.stderr,
        )
    if not done:
        for line in set_aside_lines(summary):
            print(line, file=sys.stderr)
        print(f"dora-rl: stopped: {reason}", file=sys.stderr)
        if (run_dir / "config.json").is_file():
            print(f"go on with  dora-rl train {run_dir}/config.json --resume", file=sys.stderr)
        return STOPPED
    if (why := nothing_learned(summary)) is not None:
        print(f"dora-rl: nothing was learned: {why}", file=sys.stderr)
        if summary.get("updates_skipped"):
            return NOTHING_LEARNED
    _report(run_dir, summary, reason)
    return 0


def nothing_learned(summary: dict[str, Any]) -> str | None:
    """Why no update of the run had anything to apply; None: one had."""
    if summary.get("updates_applied"):
        return None
    if summary.get("updates_skipped"):
        return "the weights are those of the start"
    if summary.get("updates_without_gradient"):
        return "every gradient was zero (all rewards of a group were equal)"
    return None


def _skipped(summary: dict[str, Any]) -> str:
    skipped = summary["updates_skipped"]
    num = skipped + summary["updates_without_gradient"] + summary["updates_applied"]
    return (
        f"{skipped} of {num} updates were skipped: their loss or gradient was not finite; "
        "look at the rewards, algorithm.loss and trainer.lr"
    )


def _train(
    prepared: Prepared, server: ForkServer | None, *, resume: bool
) -> tuple[dict[str, Any], bool, str]:
    from dora_rl.commands.train_progress import Progress
    from dora_rl.worlds.kinds import open_run

    interrupted = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt  # the second one, at once
        interrupted.set()

    config, run = prepared.config, open_run(prepared, resume=resume, server=server)
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which sets its own
        signal.signal(number, on_signal)
    try:
        with Progress(run, show=config.logging.progress).showing():
            try:
                stop = run.run(interrupted.is_set)
            finally:
                summary = run.close()
    except KeyboardInterrupt:
        run.kill_all()
        raise
    return summary, stop.done, stop.reason


def set_aside_lines(summary: dict[str, Any]) -> list[str]:
    """Which prompts were given up, and why; the first few in full."""
    aside = summary.get("set_aside", [])
    lines = [f"  set aside: prompt {one['prompt']}: {one['reason']}" for one in aside[:ASIDE_SHOWN]]
    if len(aside) > ASIDE_SHOWN:
        lines.append(f"  and {len(aside) - ASIDE_SHOWN} more; all are in summary.json")
    return lines


def _report(run_dir: Path, summary: dict[str, Any], reason: str) -> None:
    from dora_rl.observe.plots import can_draw, draw_run

    print(f"{reason}: {summary['steps']} steps in {summary['wall_s']:.0f} s")
    for line in report_lines(run_dir, summary):
        print(f"  {line}")
    for line in set_aside_lines(summary):
        print(line)
    if summary.get("samples_mismatched"):
        print(
            f"  WRONG: {summary['samples_mismatched']} samples are not what their version gives; "
            f"see dora-rl audit {run_dir}"
        )
    picture = draw_run(run_dir).name if can_draw() else ""
    print(f"look at  {run_dir}/summary.json  metrics.jsonl  rollouts.jsonl  {picture}")
    print(f"in full  dora-rl dashboard {run_dir}")
    print(f"prove it dora-rl audit {run_dir}")


def report_lines(run_dir: Path, summary: dict[str, Any]) -> list[str]:
    """The figures of summary.json that a user looks for first."""
    from dora_rl.observe.eval_figures import failed_text
    from dora_rl.weights.run_models import has_weights

    lines: list[str] = []
    first, last = summary["eval_first"], summary["eval_last"]
    for name in ("sampled", "greedy", "tail_sampled", "tail_greedy") if first and last else ():
        if first.get(name) is not None or last.get(name) is not None:
            lines.append(f"held-out {name:13} {_score(first, name)} -> {_score(last, name)}")
    for when, found in (("first", first), ("last", last)):
        if found and (text := failed_text(found)):
            lines.append(f"{when} evaluation: {text}")
    best = summary["best"]
    if best is not None:
        kept = has_weights(run_dir, best["version"])
        lines.append(
            f"best version {best['version']} ({best['metric']} {best['value']:.3f}): "
            + (f"dora-rl export {run_dir} OUT_DIR --step best" if kept else "its weights are gone")
        )
    rate = summary["tokens_per_s"]
    lines.append(
        f"staleness mean {summary['staleness_mean']:.2f} max {summary['staleness_max']}, "
        f"mixed versions {summary['mixed_version_frac']:g}, "
        f"discarded tokens {summary['discarded_tokens']}, "
        + (f"{rate:.0f} tokens/s" if rate is not None else "tokens/s not known")
        + f" (start-up of {summary['startup_s']:.0f} s not counted)"
    )
    if failed := summary.get("samples_failed"):
        trained = summary["samples_trained"]
        lines.append(f"samples: {trained} trained + {failed} failed in trained groups")
    return lines


def _score(found: dict[str, Any], name: str) -> str:
    value = found.get(name)
    return "failed" if value is None else f"{value:.3f}"
