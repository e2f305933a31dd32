"""What killed runs leave in shared memory and temporary folders: the next run gives it back.

A run that is killed leaves its live versions in shared memory. They are copies of what its run
directory has on disk, so they may go as soon as the run is dead: while it lives it holds the lock
of a file beside them, which says so to everybody who sees the same memory, in containers too. The
same holds for the folder of a controller's socket.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

OWNER = ".owner"


def store_name(run: str) -> str:
    return f"dora-rl-{os.getuid()}-{run}"


def transfer_of(root: Path) -> Path:
    """Where requests on the move lie, beside a run's live versions."""
    return root.with_name(root.name + "-transfer")


def claim(root: Path) -> int:
    """Say that a store is in use; it is until the descriptor is closed or the process ends.

    Several may: a depot that was given up can still be there when its successor comes.
    """
    while True:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_there(root / OWNER, handle):
            return handle
        os.close(handle)  # somebody swept it between the two


def sweep(folder: Path) -> int:
    """Remove this user's stores there whose runs are dead; returns the bytes given back."""
    found = [path.parent for path in folder.glob(f"{store_name('*')}/{OWNER}")]
    return sum(map(_remove, found))


def _remove(root: Path) -> int:
    try:
        handle = os.open(root / OWNER, os.O_RDWR)
    except OSError:
        return 0  # gone, or another user's
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        num_bytes = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())
        shutil.rmtree(transfer_of(root), ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)
        return num_bytes
    except OSError:
        return 0  # it lives, or somebody else is removing it
    finally:
        os.close(handle)


def _is_there(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
