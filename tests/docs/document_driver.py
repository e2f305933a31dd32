"""Runs the blocks of one page in order, in the directory it is started in. A program of its own.

    python document_driver.py BLOCKS.json

Python blocks share one scope, as a reader's session would; shell blocks run under `bash -eu`. A
block with a file name on its first line is saved. What a page left running is ended at its end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def end_what_stays() -> None:
    for line in STAYING.read_text().splitlines() if STAYING.is_file() else ():
        try:
            os.killpg(int(line), signal.SIGTERM)
        except ProcessLookupError:
            continue


def main(path: str) -> None:
    sys.path.insert(0, os.getcwd())
    scope: dict[str, Any] = {"__name__": "__page__"}
    try:
        for number, block in enumerate(json.loads(Path(path).read_text())):
            print(f"### {block['place']}", flush=True)
            run_block(block, scope, number)
    finally:
        end_what_stays()


if __name__ == "__main__":
    main(sys.argv[1])
