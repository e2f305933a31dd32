"""Files of JSON lines without checksums: read them, and take back what a run must not keep.

Their ends follow the rule of `append_log`: a torn last line is not there, a damaged one is named.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dora_rl.io.append_log import AppendLog, Damaged, lines_end, write_whole


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield _parsed(line, f"{path} line {number}")


def _parsed(line: bytes, name: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        raise Damaged(f"{name} {shape_problem(error)}") from error


def shape_problem(error: Exception) -> str:
    """What is wrong with JSON that cannot be read, or is not of the shape that was written."""
    if isinstance(error, KeyError):
        return f"is damaged (it has no {error.args[0]})"
    return f"is damaged ({error})"


def cut_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Remove a torn last line, and whole lines from the end on until one is to be kept.

    Costs what is removed, not what is there.
    """
    end = lines_end(path)
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while end:
            start = data.rfind(b"\n", 0, end - 1) + 1
            if keep(_parsed(data[start:end], f"{path} at byte {start}")):
                break
            end = start
    AppendLog(path, size=end).close()


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Remove a torn last line, and every line that is not to be kept. Reads the whole file."""
    cut_lines(path, lambda line: True)
    lines = list(read_lines(path))
    if all(map(keep, lines)):
        return
    write_whole(path, ((json.dumps(line) + "\n").encode() for line in lines if keep(line)))
