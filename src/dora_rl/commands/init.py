"""`dora-rl init MODEL DATA`: a commented configuration to begin with."""

from __future__ import annotations

import argparse
from pathlib import Path

from dora_rl.commands.arguments import argument, command, prepare_output
from dora_rl.types import UserError
from dora_rl.user_code import require


@command(
    "write a commented configuration for a model and a file of data",
    argument("model", metavar="MODEL", help="Hugging Face directory, or an id of the hub"),
    argument("data", metavar="DATA", help="jsonl, json or parquet file, or a directory of those"),
    argument("--out", type=Path, default=Path("first.toml"), help="(default: first.toml)"),
)
def init(args: argparse.Namespace) -> int:
    from dora_rl.setup.starter import starter_text

    out = args.out
    require((not out.exists(), f"{out} exists; choose another file with --out"))
    prepare_output(out)
    text = starter_text(args.model, args.data, f"runs/{out.stem}")
    try:
        out.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    print(f"wrote {out}", f"look at it, then  dora-rl check {out}", sep="\n")
    return 0
