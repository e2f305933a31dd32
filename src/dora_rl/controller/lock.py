"""One controller for a run directory: a lock that its workers hold too.

The lock lives as long as any process that inherited it, so a resumed run begins only when the last
worker of the one before is gone.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dora_rl.types import UserError

WAIT_S = 10.0
POLL_S = 0.05


class RunLock:
    """Taken when made; `fd` is what workers inherit."""

    def __init__(self, run_dir: Path, wait_s: float = WAIT_S) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / ".lock"
        self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(self.fd)
                    raise UserError(
                        f"{run_dir} is in use by another dora-rl; end it, or set runtime.run_dir"
                    ) from None
            time.sleep(POLL_S)

    def is_there(self) -> bool:
        """False: the run directory was deleted or moved under the run."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self.fd))
        except OSError:
            return False

    def release(self) -> None:
        os.close(self.fd)


LEARNER_LOCK = ".learner-lock"


@contextmanager
def learner_ended(run_dir: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """While no learner of this run lives: one that was given up may still be writing a version."""
    handle = os.open(run_dir / LEARNER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UserError(
                        f"a learner of {run_dir} is still there; end it, then --resume"
                    ) from None
            time.sleep(POLL_S)
        yield
    finally:
        os.close(handle)
