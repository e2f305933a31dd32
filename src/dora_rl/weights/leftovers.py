"""What killed runs leave in shared memory and temporary folders: the next run gives it back.

A run that is killed leaves its live versions in shared memory. Those that its run directory has on
disk may go as soon as the run is dead: while it lives it holds the lock of a file beside them,
which says so to everybody who sees the same memory, in containers too. The same holds for the
folder of a controller's socket.

The lock's file names the run directory. A version that is sealed and not on disk there stays, with
its masters, so that the run can be resumed without a loss: that is one version of a run at most,
for `KEEP_S` at most, and only while the run directory is there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from dora_rl.weights.private import open_own, private_folder, problem_of

OWNER = ".owner"
SPARE = ".spare"  # memory of a version that nobody reads, to be filled again
KEEP_S = 3 * 24 * 3600.0  # over a weekend; after that a resume trains one step again


def store_name(run: str) -> str:
    return f"dora-rl-{os.getuid()}-{run}"


def transfer_of(root: Path) -> Path:
    """Where requests on the move lie: with a run's live versions, where no other user comes."""
    return root / "transfer"


def claim(root: Path, run_dir: Path | None = None) -> int:
    """Say that a store is in use; it is until the descriptor is closed or the process ends.

    Several may: a relay that was given up can still be there when its successor comes. `run_dir`:
    where the same versions are on disk, or will be; a cache has none.
    """
    while True:
        private_folder(root)
        handle = open_own(root / OWNER)
        fcntl.flock(handle, fcntl.LOCK_SH)
        if _is_there(root / OWNER, handle):
            if run_dir is not None:
                os.ftruncate(handle, 0)
                os.pwrite(handle, str(run_dir.resolve()).encode(), 0)
            return handle
        os.close(handle)  # somebody swept it between the two


def owner_of(root: Path) -> str:
    """The run directory of whoever claimed a store last; empty: not known."""
    try:
        return (root / OWNER).read_text(errors="replace")
    except OSError:
        return ""


def sweep(folder: Path, now_s: float | None = None) -> int:
    """Remove what this user's dead runs need no more of their stores there; returns the bytes given
    back."""
    found = [path.parent for path in folder.glob(f"{store_name('*')}/{OWNER}")]
    return sum(_remove(root, time.time() if now_s is None else now_s) for root in found)


def _remove(root: Path, now_s: float) -> int:
    if problem_of(root) or problem_of(root / OWNER):
        return 0  # another user has laid it there
    try:
        handle = os.open(root / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return 0  # gone, or another user's
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(transfer_of(root), ignore_errors=True)
        run_dir = os.pread(handle, 4096, 0).decode(errors="replace")
        kept = _only_here(root, Path(run_dir), now_s) if run_dir else set[str]()
        gone = [root]
        if kept:
            gone = [
                entry
                for folder in (root, root / "masters")
                for entry in (folder.iterdir() if folder.is_dir() else ())
                if entry.is_dir() and entry.name not in {*kept, "masters"}
            ]
        num_bytes = sum(map(_num_bytes, gone))
        for entry in gone:
            shutil.rmtree(entry, ignore_errors=True)
        for folder in (root, root / "masters"):
            (folder / SPARE).unlink(missing_ok=True)
        return num_bytes
    except OSError:
        return 0  # it lives, or somebody else is removing it
    finally:
        os.close(handle)


def _only_here(root: Path, run_dir: Path, now_s: float) -> set[str]:
    """The names of sealed versions that are newer than all that the run has on disk."""
    if not (run_dir / "events").is_dir():
        return set()  # deleted, or moved: nobody resumes it
    weights = run_dir / "weights"
    on_disk = [e.name for e in weights.iterdir() if e.name.isdigit()] if weights.is_dir() else []
    return {
        entry.name
        for entry in root.iterdir()
        if entry.name.isdigit()
        and entry.name > max(on_disk, default="")
        and now_s - entry.stat().st_mtime < KEEP_S
    }


def _num_bytes(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())


def _is_there(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
