"""The files of a run beside its event log: metrics, totals, configuration, rollouts. Read only.

metrics.jsonl is followed as it grows. rollouts.jsonl may be gigabytes: a sample is found by
bisection, because its lines are ordered by step and the log says in which step a group trained.
Any file may be missing (a simulated run has none); what would come from it is then left out.
"""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from dora_rl.observe.segments import segments

SILENT_S = 10.0  # the controller writes a tick at least every second


class RunFiles:
    """One run directory, or the folder of an event log alone."""

    def __init__(self, run: Path) -> None:
        self.folder = run
        self.events = run / "events" if (run / "events").is_dir() else run
        self.steps: list[dict[str, Any]] = []  # lines of metrics.jsonl
        self.evaluations: list[dict[str, Any]] = []
        self._read = (0, 0)  # of metrics.jsonl: which file, and how far
        self._prompts_read = (0, 0)
        self._prompt_at: dict[int, int] = {}  # its place in prompts.jsonl

    def log_bytes(self) -> int:
        return sum(path.stat().st_size for path in segments(self.events))

    def silent_s(self) -> float:
        """Since when nothing was written to the log."""
        try:
            return time.time() - segments(self.events)[-1].stat().st_mtime
        except (IndexError, OSError):  # none yet, or the folder is gone
            return math.inf

    def follow(self) -> bool:
        """Read new lines of metrics.jsonl; from its beginning if a resume made it anew."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return False
        found = path.stat()
        inode, offset = self._read
        if inode != found.st_ino or found.st_size < offset:
            offset, self.steps, self.evaluations = 0, [], []
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._read = (found.st_ino, offset + end)
        for text in data[:end].splitlines():
            with suppress(ValueError, KeyError, TypeError):  # of a damaged line nothing is shown
                self._add(json.loads(text))
        return end > 0

    def _add(self, line: dict[str, Any]) -> None:
        if "step" in line:
            self.steps.append(line | {"step": int(line["step"])})
        else:  # one that failed is made up for after a resume
            others = [e for e in self.evaluations if e["version"] != line["version"]]
            self.evaluations = [*others, line]

    def prompts(self, wanted: Sequence[int]) -> dict[int, str]:
        """How the prompts begin, of those that are known. Where each stands is kept; prompts.jsonl
        is read on from where it was."""
        path = self.folder / "prompts.jsonl"
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            self._index_prompts(file)
            there = [prompt for prompt in wanted if prompt in self._prompt_at]
            return {prompt: _text_at(file, self._prompt_at[prompt]) for prompt in there}

    def _index_prompts(self, file: IO[bytes]) -> None:
        found = os.fstat(file.fileno())
        inode, offset = self._prompts_read
        if inode != found.st_ino or found.st_size < offset:
            offset, self._prompt_at = 0, {}
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            with suppress(ValueError, KeyError, TypeError):  # of a damaged line nothing is shown
                self._prompt_at[json.loads(line)["prompt"]] = offset
            offset += len(line)
        self._prompts_read = (found.st_ino, offset)

    def document(self, name: str) -> dict[str, Any]:
        """A JSON file of the run, {} if it is not there (yet) or damaged."""
        try:
            found = json.loads((self.folder / name).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def rollout(self, step: int, group: int, sample: int) -> dict[str, Any] | None:
        """One trained sample, as rollouts.jsonl has it."""
        path = self.folder / "rollouts.jsonl"
        if not path.is_file():
            return None
        with path.open("rb") as file:
            places = range(path.stat().st_size)
            _to_line(file, bisect_left(places, step, key=partial(_step_after, file)))
            whole = (json.loads(line) for line in file if line.endswith(b"\n"))
            of_step = takewhile(lambda record: record["step"] <= step, whole)
            key = (group, sample)
            return next((r for r in of_step if (r["group"], r["sample"]) == key), None)


def _text_at(file: IO[bytes], place: int) -> str:
    file.seek(place)
    with suppress(ValueError, AttributeError):  # the file was written anew
        return str(json.loads(file.readline()).get("text", ""))
    return ""


def _step_after(file: IO[bytes], place: int) -> float:
    """Of the first whole line that begins at `place` or later; past the last one: infinite."""
    _to_line(file, place)
    line = file.readline()
    return json.loads(line)["step"] if line.endswith(b"\n") else math.inf


def _to_line(file: IO[bytes], place: int) -> None:
    """To the first line that begins at `place` or later."""
    file.seek(max(0, place - 1))
    if place:
        file.readline()
