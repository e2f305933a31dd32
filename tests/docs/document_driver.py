"""Runs the blocks of one page in order, in the directory it is started in. A program of its own.

    python document_driver.py BLOCKS.json

Python blocks share one scope, as a reader's session would; shell blocks run under `bash -eu`. A
block with a file name on its first line is saved. What a page left running is ended at its end.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

STAYING = Path(".staying")  # process groups that the stand-in for `dora-rl` left running


def run_block(block: dict[str, Any], scope: dict[str, Any], number: int) -> None:
    text, saved_as = block["text"], block["saved_as"]
    if saved_as:
        Path(saved_as).parent.mkdir(parents=True, exist_ok=True)
        Path(saved_as).write_text(text)
    elif block["language"] == "bash":
        subprocess.run(["bash", "-eu", "-o", "pipefail", "-c", text], check=True)
    elif block["language"] == "python":
        # A real file, so that tracebacks and `inspect` find the source.
        source = Path(f".block_{number}.py").resolve()
        source.write_text(text)
        exec(compile(text, str(source), "exec"), scope)


def wait_for_ports(blocks: list[dict[str, Any]]) -> TextIO | None:
    """Pages name ports, so of those that start a server one runs at a time. Held until the end."""
    if not any(re.search(r"dora-rl (serve|dashboard)", block["text"]) for block in blocks):
        return None
    lock = (Path(tempfile.gettempdir()) / "dora_rl_pages.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def end_what_stays(staying: Path = STAYING) -> None:
    """Ask each server to end; after a while, end it."""
    left = [int(line) for line in staying.read_text().split()] if staying.is_file() else []
    for wanted in (signal.SIGTERM, *(50 * (0,)), signal.SIGKILL):
        left = [group for group in left if _signalled(group, wanted)]
        if not left:
            return
        time.sleep(0.2 if wanted == 0 else 0.0)


def _signalled(group: int, wanted: int) -> bool:
    try:
        os.killpg(group, wanted)
    except ProcessLookupError:
        return False
    return True


def main(path: str) -> None:
    sys.path.insert(0, os.getcwd())
    scope: dict[str, Any] = {"__name__": "__page__"}
    blocks = json.loads(Path(path).read_text())
    lock = wait_for_ports(blocks)
    try:
        for number, block in enumerate(blocks):
            print(f"### {block['place']}", flush=True)
            run_block(block, scope, number)
    finally:
        end_what_stays()
        if lock is not None:
            lock.close()


if __name__ == "__main__":
    main(sys.argv[1])
