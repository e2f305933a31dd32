"""`dora-rl sft DATA.jsonl --model DIR --out DIR`: supervised warm start on demonstrations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.commands.arguments import JSON, argument, check_least, prepare_output, write_json
from dora_rl.user_code import require

if TYPE_CHECKING:
    from dora_rl.trainer.sft import SftProgress

SUMMARY = "supervised warm start on jsonl rows of prompt and completion"
_LINES_MAX = 20  # of progress, whatever the number of updates


ARGUMENTS = (
    argument("data", type=Path, nargs="+", metavar="DATA.jsonl"),
    argument("--model", type=Path, required=True, help="Hugging Face directory"),
    argument("--out", type=Path, required=True, help="a new or empty directory"),
    argument("--epochs", type=float, default=1.0),
    argument("--batch-examples", type=int, default=64, help="of one update"),
    argument("--lr", type=float, default=1e-5),
    argument("--schedule", default="constant", help="constant, linear or cosine"),
    argument("--warmup-updates", type=int, default=0),
    argument("--weight-decay", type=float, default=0.0),
    argument("--tokens-max", type=int, default=0, help="longer rows are left out"),
    argument("--pack-tokens", type=int, default=0, help="of one micro-batch"),
    argument("--eval-examples", type=int, default=0, help="held out from the end"),
    argument("--keep-order", action="store_true", help="do not shuffle the rows"),
    argument("--lora-rank", type=int, default=0),
    argument("--device", default="auto"),
    argument("--threads", type=int, default=0),
    argument("--seed", type=int, default=0),
    JSON,
)


def _check(args: argparse.Namespace) -> None:
    model, out = args.model, args.out
    free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(
        (model.is_dir(), f"--model: {model} is not a directory with a Hugging Face model"),
        (free, f"--out: {out} is not an empty directory; choose another"),
        (args.epochs > 0, "--epochs must be more than 0"),
        (args.batch_examples > 0, "--batch-examples must be more than 0"),
        (args.lr > 0, "--lr must be more than 0"),
    )
    names = ("warmup_updates", "tokens_max", "pack_tokens", "eval_examples", "lora_rank")
    check_least(args, 0, *names)


def run(args: argparse.Namespace) -> int:
    _check(args)
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
    if args.json is not None:
        figures = {name: getattr(result, name) for name in result.__slots__}
        write_json(args.json, figures | {"out": str(result.out)})
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
