"""`dora-rl sft DATA.jsonl --model DIR --out DIR`: supervised warm start on demonstrations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.commands.files import prepare_output, write_json
from dora_rl.types import UserError

if TYPE_CHECKING:
    from dora_rl.trainer.sft import SftProgress

SUMMARY = "supervised warm start on jsonl rows of prompt and completion"
_LINES_MAX = 20  # of progress, whatever the number of updates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, nargs="+", metavar="DATA.jsonl")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty directory")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-examples", type=int, default=64, help="of one update")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--schedule", default="constant", help="constant, linear or cosine")
    parser.add_argument("--warmup-updates", type=int, default=0)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--tokens-max", type=int, default=0, help="longer rows are left out")
    parser.add_argument("--pack-tokens", type=int, default=0, help="of one micro-batch")
    parser.add_argument("--eval-examples", type=int, default=0, help="held out from the end")
    parser.add_argument("--keep-order", action="store_true", help="do not shuffle the rows")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")


def _check(args: argparse.Namespace) -> None:
    if not args.model.is_dir():
        raise UserError(f"--model: {args.model} is not a directory with a Hugging Face model")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise UserError(f"--out: {args.out} is not an empty directory; choose another")
    for name in ("epochs", "batch_examples", "lr"):
        if not getattr(args, name) > 0:
            raise UserError(f"--{name.replace('_', '-')} must be more than 0")
    for name in ("warmup_updates", "tokens_max", "pack_tokens", "eval_examples", "lora_rank"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name.replace('_', '-')} must be 0 or more")


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
