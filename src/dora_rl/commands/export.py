"""`dora-rl export RUN OUT_DIR`: a run's weights as a Hugging Face directory with its tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path

from dora_rl.commands.arguments import argument

SUMMARY = "write a run's weights as a Hugging Face directory"


ARGUMENTS = (
    argument("run", type=Path, metavar="RUN", help="run directory"),
    argument("out", type=Path, metavar="OUT_DIR", help="a new or empty directory"),
    argument(
        "--step",
        default="last",
        metavar="N|best|last",
        help="weights after N training steps (default: the newest)",
    ),
)


def run(args: argparse.Namespace) -> int:
    from dora_rl.weights.run_models import export_model, find_model, run_config

    config = run_config(args.run)
    found = find_model(args.run, args.step)
    export_model(found, args.out, config.checkpoint.shard_bytes_max)
    print(f"wrote {found.label} to {args.out}")
    return 0
