"""No room on a disk: recognised anywhere, told in one line, and never the end of the work.

Everything on disk is written so that a half-written end is cut off or ignored by the next start;
a run that finds no room therefore stops at once, and goes on from the log when there is room.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from dora_rl.store.table import TableError
from dora_rl.weights.store import WeightsError, WeightsFull

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_ERRORS = (OSError, TableError, WeightsError)  # what writing may raise; ask `is_full` then


def is_full(error: BaseException | None) -> bool:
    """Whether this error, or the one that caused it, says that there was no room."""
    while error is not None:
        if isinstance(error, WeightsFull):
            return True
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        # Libraries that write for us (safetensors) give the system's words without its number.
        if any(
            f"{word} {number}" in str(error) for word in ("os error", "code:") for number in FULL
        ):
            return True
        error = error.__cause__
    return False


def full_line(run_dir: str | Path, error: BaseException) -> str:
    """What happened, where, and what to do."""
    if isinstance(error, WeightsFull):
        return str(error)
    where = getattr(error, "filename", None) or run_dir
    free = shutil.disk_usage(run_dir).free >> 20
    return f"no room to write {where} ({free} MiB free on its disk); make room and --resume"
