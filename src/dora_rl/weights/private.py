"""Places that are this user's alone: made so, and looked at before anything in them is used.

Shared memory and temporary folders are open to every user of a host. Whoever may write beside a
version could put another in its place, and whoever may open a lock's file could hold it for ever.

Never follows a symbolic link and never mends what another user made: it is refused, in one line.
Invariant: a folder that `private_folder` has returned from is this user's and closed to all others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dora_rl.types import UserError

_OF_OTHERS = 0o022  # who else may write
_ALL_OF_OTHERS = 0o077


class NotPrivate(UserError):
    """Another user has, or may change, what should be this user's alone."""


def private_folder(path: Path) -> None:
    """Make it, or close one of ours to others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check_own(path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise NotPrivate(f"cannot use {path}: {error.strerror}; {_ADVICE}") from None
    with held(handle):
        if stat.S_IMODE(os.fstat(handle).st_mode) & _ALL_OF_OTHERS:
            os.fchmod(handle, 0o700)


_ADVICE = "remove it, or name a folder that only you may write to in weights.root"


def problem_of(path: Path) -> str:
    """What speaks against a folder or file being this user's alone to change; "" if nothing does
    or nothing is there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ""
    mode = found.st_mode
    problems = (
        (stat.S_ISLNK(mode), "it is a symbolic link"),
        (found.st_uid != os.geteuid(), f"it belongs to user {found.st_uid}"),
        (not stat.S_ISDIR(mode) and not stat.S_ISREG(mode), "it is neither a folder nor a file"),
        (mode & _OF_OTHERS, f"other users may write to it (mode {stat.S_IMODE(mode):o})"),
    )
    return next((problem for is_there, problem in problems if is_there), "")


def check_own(*paths: Path) -> None:
    for path in paths:
        if problem := problem_of(path):
            raise NotPrivate(f"cannot use {path}: {problem}; {_ADVICE}")


@contextlib.contextmanager
def held(handle: int) -> Iterator[int]:
    """Closes it at the end, whatever happens."""
    try:
        yield handle
    finally:
        os.close(handle)


def lock_now(handle: int, how: int = fcntl.LOCK_EX) -> bool:
    """Whether the lock was free; then it is ours, until the file is closed."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_own(path: Path, *, mode: int = 0o600) -> int:
    """A file that is read, written and locked by this user only, made where it is not there."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with contextlib.suppress(PermissionError):  # another user's, on a disk
        # Who may open it may lock it: files of older releases are closed to others too.
        os.fchmod(handle, mode)
    return handle
