"""Files that commands write, and run directories that they read.

Whether a result can be written is found out before the work begins, not after it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dora_rl.types import UserError


def prepare_output(path: Path | None) -> None:
    """Make the folder of a result; refuse a place that cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"cannot write {path}: permission denied")


def write_json(path: Path, document: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def events_folder(run: Path) -> Path:
    """The event log of a run directory; the folder of the log itself will do too."""
    if not run.is_dir():
        raise UserError(f"{run} is not a run directory")
    return run / "events" if (run / "events").is_dir() else run
