"""A file system that is soon full, for tests of stores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")


@contextmanager
def small_disk(mount: Path, size: str) -> Iterator[None]:
    """Mounted at `mount`, which is made; the test is skipped where that is not permitted."""
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
