"""Files of JSON lines that are only ever appended to: read them, and cut off a bad end."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open() as file:
            yield from map(json.loads, file)


def shape_problem(error: Exception) -> str:
    """What is wrong with JSON that cannot be read, or is not of the shape that was written."""
    if isinstance(error, KeyError):
        return f"is damaged (it has no {error.args[0]})"
    return f"is damaged ({error})"


def cut_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Remove a torn last line, and whole lines from the end on until one is to be kept.

    Costs what is removed, not what is there.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
            while end:
                start = data.rfind(b"\n", 0, end - 1) + 1
                if keep(json.loads(data[start:end])):
                    break
                end = start
        file.truncate(end)


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Remove a torn last line, and every line that is not to be kept. Reads the whole file."""
    cut_lines(path, lambda line: True)
    lines = list(read_lines(path))
    if all(map(keep, lines)):
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines if keep(line)))
    temporary.replace(path)
