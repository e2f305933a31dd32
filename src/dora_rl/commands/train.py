"""`dora-rl train CONFIG.toml a.b=c --resume --dry-run`, and `sft`, the supervised warm start.

Exit status of `train`: 0 all steps are trained, 2 the input is wrong, 3 stopped and resumable, 4
all steps are done and every update was skipped as non-finite, 130 cut off by a second signal
(resumable too). A run whose every gradient was zero says so: it did what it was told, and learned
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.commands.arguments import (
    JSON,
    OVERRIDES,
    argument,
    at_least,
    command,
    prepare_output,
    write_json,
)
from dora_rl.commands.words import may_be_lost
from dora_rl.user_code import require

if TYPE_CHECKING:
    from dora_rl.core.actions import Stop
    from dora_rl.trainer.sft import SftProgress
    from dora_rl.worlds.start import Start

Heard = Callable[[dict[str, Any]], None]
STOPPED = 3
NOTHING_LEARNED = 4
INTERRUPTED = "interrupted"
ASIDE_SHOWN = 5
CUT_SHARE_TOLD = 0.5
_LINES_MAX = 20  # of the warm start's progress, whatever the number of updates


@command(
    "train a model: dora-rl train CONFIG.toml section.key=value ...",
    argument("config", type=Path, help="a TOML file, or the config.json of a run"),
    OVERRIDES,
    argument("--resume", action="store_true", help="go on with the run directory's run"),
    argument("--dry-run", action="store_true", help="check everything, start nothing"),
)
@may_be_lost()
def train(args: argparse.Namespace) -> int:
    from dora_rl.controller.run_dir import check_not_moved
    from dora_rl.setup.settings import load_config
    from dora_rl.worlds.start import starting

    config = load_config(args.config, args.overrides)
    run_dir = Path(config.runtime.run_dir)
    if args.resume and not any(word.startswith("runtime.run_dir=") for word in args.overrides):
        check_not_moved(args.config, run_dir)
    with contextlib.ExitStack() as signals:  # until the last word is said
        with starting(config, resume=args.resume, warm=not args.dry_run) as start:
            if args.dry_run:
                print(*start.prepared.describe(), sep="\n")
                return 0
            summary, stop = conduct(start, signals)
        return _tell_end(run_dir, summary, stop)


def _tell_end(run_dir: Path, summary: dict[str, Any], stop: Stop) -> int:
    """What came of it; the exit status."""
    if summary.get("updates_skipped"):
        print(f"dora-rl: {_skipped(summary)}", file=sys.stderr)
    if summary.get("num_user_errors"):
        print(
            f"your code raised {summary['num_user_errors']} times; tracebacks in "
            f"{run_dir}/user_errors.log",
            file=sys.stderr,
        )
    if not stop.done:
        lines = [*set_aside_lines(summary), f"dora-rl: stopped: {stop.reason}"]
        if (run_dir / "config.json").is_file():
            lines.append(f"go on with  dora-rl train {run_dir}/config.json --resume")
        print(*lines, sep="\n", file=sys.stderr)
        return STOPPED
    if (why := nothing_learned(summary)) is not None:
        print(f"dora-rl: nothing was learned: {why}", file=sys.stderr)
        if summary.get("updates_skipped"):
            return NOTHING_LEARNED
    _report(run_dir, summary, stop.reason)
    return 0


def nothing_learned(summary: dict[str, Any]) -> str | None:
    """Why no update of the run had anything to apply; None: one had."""
    whys = {
        "updates_applied": None,
        "updates_skipped": "the weights are those of the start",
        "updates_without_gradient": "every gradient was zero (all rewards of a group were equal)",
    }
    if summary.get("samples_trained") and summary.get("tokens_trained") == 0:
        whys["samples_trained"] = "no sample had a token of the policy (was there room to write?)"
    return next((why for count, why in whys.items() if summary.get(count)), None)


def _skipped(summary: dict[str, Any]) -> str:
    skipped = summary["updates_skipped"]
    num = skipped + summary["updates_without_gradient"] + summary["updates_applied"]
    return (
        f"{skipped} of {num} updates were skipped: their loss or gradient was not finite; "
        "look at the rewards, algorithm.loss and trainer.lr"
    )


def conduct(
    start: Start,
    signals: contextlib.ExitStack,
    hear: Heard | None = None,
    why_stop: Callable[[], str] = lambda: "",
) -> tuple[dict[str, Any], Stop]:
    """A run from its start to its end, with its progress shown. It stops by a signal, which is
    heard until `signals` ends, or when `why_stop` says why; `hear` gets the line of every step and
    evaluation."""
    from dora_rl.commands.progress import TrainProgress

    config, run = start.prepared.config, start.open()
    asked = signals.enter_context(asked_to_stop())  # after Ray, which sets its own handlers
    try:
        with TrainProgress(run, show=config.logging.progress, hear=hear).showing():
            try:
                stop = run.run(lambda: INTERRUPTED if asked.is_set() else why_stop())
            finally:
                summary = run.close()
    except KeyboardInterrupt:
        run.kill_all()
        raise
    return summary, stop


@contextlib.contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Set by the first signal of the two that ask a program to end; the second one raises. Only
    the main thread hears of signals; elsewhere this is never set."""
    asked = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt  # the second one, at once
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def set_aside_lines(summary: dict[str, Any]) -> list[str]:
    """Which prompts were given up, and why; the first few in full."""
    aside = summary.get("set_aside", [])
    lines = [f"  set aside: prompt {one['prompt']}: {one['reason']}" for one in aside[:ASIDE_SHOWN]]
    if len(aside) > ASIDE_SHOWN:
        lines.append(f"  and {len(aside) - ASIDE_SHOWN} more; all are in summary.json")
    return lines


def _report(run_dir: Path, summary: dict[str, Any], reason: str) -> None:
    from dora_rl.observe.plots import can_draw, draw_run

    lines = [f"{reason}: {summary['steps']} steps in {summary['wall_s']:.0f} s"]
    lines += [*(f"  {line}" for line in report_lines(run_dir, summary)), *set_aside_lines(summary)]
    if mismatched := summary.get("samples_mismatched"):
        lines.append(
            f"  WRONG: {mismatched} samples are not what their version gives; "
            f"see dora-rl audit {run_dir}"
        )
    print(*lines, sep="\n")
    picture = draw_run(run_dir).name if can_draw() else ""
    print(
        f"look at  {run_dir}/summary.json  metrics.jsonl  rollouts.jsonl  {picture}",
        f"in full  dora-rl dashboard {run_dir}",
        f"prove it dora-rl audit {run_dir}",
        sep="\n",
    )


def report_lines(run_dir: Path, summary: dict[str, Any]) -> list[str]:
    """The figures of summary.json that a user looks for first."""
    from dora_rl.observe.eval_figures import failed_text
    from dora_rl.weights.run_models import has_weights

    first, last = summary["eval_first"], summary["eval_last"]
    lines = [
        f"held-out {name:13} {_score(first, name)} -> {_score(last, name)}"
        for name in ("sampled", "greedy", "tail_sampled", "tail_greedy")
        if first and last and (first.get(name) is not None or last.get(name) is not None)
    ]
    lines += [
        f"{when} evaluation: {text}"
        for when, found in (("first", first), ("last", last))
        if found and (text := failed_text(found))
    ]
    if (best := summary["best"]) is not None:
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
        lines.append(
            f"samples: {summary['samples_trained']} trained + {failed} failed in trained groups"
        )
    return lines + _cut_off(run_dir)


def _cut_off(run_dir: Path) -> list[str]:
    """Said where most samples of the last step never came to their own end."""
    from dora_rl.io.append_log import read_lines

    steps = [line for line in read_lines(run_dir / "metrics.jsonl") if "step" in line]
    share = steps[-1].get("truncated_frac", 0.0) if steps else 0.0
    if share < CUT_SHARE_TOLD:
        return []
    return [
        f"{share:.0%} of the samples of the last step were cut off: they filled the context, "
        "or rollout.tokens_max"
    ]


def _score(found: dict[str, Any], name: str) -> str:
    value = found.get(name)
    return "failed" if value is None else f"{value:.3f}"


@command(
    "supervised warm start on jsonl rows of prompt and completion, or of messages",
    argument("data", type=Path, nargs="+", metavar="DATA.jsonl"),
    argument("--model", type=Path, required=True, help="Hugging Face directory"),
    argument("--out", type=Path, required=True, help="a new or empty directory"),
    argument("--epochs", type=float, default=1.0),
    argument("--batch-examples", type=int, default=64, help="of one update"),
    argument("--lr", type=float, default=1e-5),
    argument("--schedule", default="constant", help="constant, linear or cosine"),
    argument("--warmup-updates", type=at_least(0), default=0),
    argument("--weight-decay", type=float, default=0.0),
    argument("--tokens-max", type=at_least(0), default=0, help="longer rows are left out"),
    argument("--pack-tokens", type=at_least(0), default=0, help="of one micro-batch"),
    argument("--eval-examples", type=at_least(0), default=0, help="held out from the end"),
    argument("--keep-order", action="store_true", help="do not shuffle the rows"),
    argument("--lora-rank", type=at_least(0), default=0),
    argument("--device", default="auto"),
    argument("--threads", type=int, default=0),
    argument("--seed", type=int, default=0),
    JSON,
)
def sft(args: argparse.Namespace) -> int:
    model, out = args.model, args.out
    free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(
        (model.is_dir(), f"--model: {model} is not a directory with a Hugging Face model"),
        (free, f"--out: {out} is not an empty directory; choose another"),
        (args.epochs > 0, "--epochs must be more than 0"),
        (args.batch_examples > 0, "--batch-examples must be more than 0"),
        (args.lr > 0, "--lr must be more than 0"),
    )
    prepare_output(args.json)
    from dora_rl.config import TrainerConfig
    from dora_rl.trainer.sft import SftOptions, run_sft

    options = SftOptions(
        epochs=args.epochs,
        batch_examples=args.batch_examples,
        tokens_max=args.tokens_max,
        shuffle=not args.keep_order,
        eval_examples=args.eval_examples,
    )
    trainer = TrainerConfig(
        lr=args.lr,
        schedule=args.schedule,
        warmup_updates=args.warmup_updates,
        weight_decay=args.weight_decay,
        pack_tokens=args.pack_tokens,
        lora_rank=args.lora_rank,
        device=args.device,
        threads=args.threads,
        seed=args.seed,
    )
    result = run_sft(args.model, args.data, args.out, options, trainer, on_progress=_show)
    print(
        f"{result.num_examples} demonstrations ({result.num_too_long} too long), "
        f"{result.num_updates} updates ({result.num_skipped} skipped), "
        f"{result.tokens} tokens in {result.wall_s:.1f} s"
    )
    print(f"loss {result.loss_first:.4f} -> {result.loss_last:.4f}")
    if result.eval_first is not None:
        print(f"held-out loss {result.eval_first:.4f} -> {result.eval_last:.4f}")
    print(f"wrote {result.out}")
    write_json(args.json, asdict(result) | {"out": str(result.out)})
    return 0


def _show(progress: SftProgress) -> None:
    every = max(1, progress.num_updates // _LINES_MAX)
    last = progress.update + 1 == progress.num_updates
    if progress.update % every == 0 or last:
        print(
            f"update {progress.update + 1}/{progress.num_updates}  loss {progress.loss:.4f}  "
            f"grad {progress.grad_norm:.2f}  lr {progress.lr:.2g}  "
            f"{progress.tokens_per_s:.0f} tokens/s",
            flush=True,
        )
