"""What the commands share: arguments as tables, checks of them, files, hints for misspelt names.

Whether a result can be written is found out before the work begins, not after it.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dora_rl.types import UserError

Argument = tuple[tuple[str, ...], dict[str, Any]]


def argument(*names: str, **options: Any) -> Argument:
    """One line of a command's `ARGUMENTS`, as `argparse` is given it."""
    return names, options


RUN = argument("run", type=Path, metavar="RUN", help="run directory, or its event log")
MODEL = argument("model", type=Path, metavar="RUN_OR_MODEL", help="a run or a model")
OVERRIDES = argument("overrides", nargs="*", default=[], help="section.key=value")
JSON = argument("--json", type=Path, metavar="FILE", help="write the figures")


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


count.__name__ = "whole number"  # argparse puts it into its error line

# Which testbed `sim` and `plan` simulate, how many GPUs, what is changed in it.
TESTBED = (
    argument("preset", metavar="PRESET", help="testbed: paper-64, moe-agentic, small, …"),
    argument("--gpus", type=count, metavar="N", help="number of GPUs; the batch stays as it is"),
    argument(
        "--seed", type=int, metavar="N", default=0, help="of the response lengths (default 0)"
    ),
    argument("--steps", type=count, metavar="N", help="training steps to simulate"),
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
    argument("--jobs", type=count, metavar="N", help="simulations at once (default: one per core)"),
)


def check_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Refuse a number that is too small; one that was not given is None."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < least:
            wanted = f"at least {least}" if least else "0 or more"
            raise UserError(f"--{name.replace('_', '-')} must be {wanted}")


def prepare_output(*paths: Path | None) -> None:
    """Make the folder of each result; refuse a place that cannot be written."""
    for path in filter(None, paths):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {path.parent}: {error.strerror}") from error
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UserError(f"cannot write {path}: permission denied")


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Nothing where no file was asked for."""
    try:
        if path is not None:
            path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def events_folder(run: Path) -> Path:
    """The event log of a run directory; the folder of the log itself will do too."""
    if not run.is_dir():
        raise UserError(f"{run} is not a run directory")
    return run / "events" if (run / "events").is_dir() else run


def hint(word: str, names: Iterable[str]) -> str:
    """The end of an error line about an unknown name.

    >>> hint("snyc", ["sync", "partial"])
    "; did you mean 'sync'?"
    """
    known = [str(name) for name in names]
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
