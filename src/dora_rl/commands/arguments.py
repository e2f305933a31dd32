"""What the commands share: what a command is, its arguments and checks of them, files, hints.

Whether a result can be written is found out before the work begins, not after it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_rl.types import UserError
from dora_rl.user_code import require

Argument = tuple[tuple[str, ...], dict[str, Any]]


def argument(*names: str, **options: Any) -> Argument:
    """One argument of a command, as `argparse` is given it."""
    return names, options


@dataclass(frozen=True, slots=True)
class Command:
    """`run` gives the exit status; `about` stands below the help."""

    run: Callable[[argparse.Namespace], int]
    summary: str
    arguments: tuple[Argument, ...]
    about: str | None = None


def command(
    summary: str, *arguments: Argument, about: str | None = None
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    return lambda run: Command(run, summary, arguments, about)


RUN = argument("run", type=Path, metavar="RUN", help="run directory, or its event log")
OVERRIDES = argument("overrides", nargs="*", default=[], help="section.key=value")
JSON = argument("--json", type=Path, metavar="FILE", help="write the figures")


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument: a whole number that is not smaller."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    read.__name__ = "whole number"  # argparse puts it into its error line
    return read


def prepare_output(*paths: Path | None) -> None:
    """Make the folder of each result; refuse a place that cannot be written."""
    for path in filter(None, paths):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {path.parent}: {error.strerror}") from error
        may_write = os.access(path if path.exists() else path.parent, os.W_OK)
        require(
            (not path.is_dir(), f"cannot write {path}: it is a folder"),
            (may_write, f"cannot write {path}: permission denied"),
        )


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Nothing where no file was asked for."""
    try:
        if path is not None:
            path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def events_folder(run: Path) -> Path:
    """The event log of a run directory; the folder of the log itself will do too."""
    require((run.is_dir(), f"{run} is not a run directory"))
    return run / "events" if (run / "events").is_dir() else run
