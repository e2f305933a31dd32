"""What instances had generated when they died: their token journals, ready to continue.

A journal's file stays until every request in it has ended, so that a controller that dies between
reading it and starting the request again loses nothing. Never read while it is being written.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from dora_rl.engine.journal import read_journal, request_json, saved_ids
from dora_rl.io.append_log import AppendLog
from dora_rl.types import GroupId, RequestId


class Journals:
    """Read when an instance is gone; of several records of a request the longest counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved: dict[RequestId, dict[str, Any]] = {}
        self._groups_of: dict[Path, set[GroupId]] = {}

    def next_incarnation(self) -> int:
        """One that no journal here has, so that no file is written twice."""
        known = [int(path.stem.rpartition(".")[2]) for path in self._folder.glob("*.*.jsonl")]
        return max(known, default=-1) + 1

    def write(self, name: str, incarnation: int, lines: bytes, *, whole: bool) -> None:
        """What an instance on another host has written to its journal."""
        file = AppendLog.of_lines(self._folder / f"{name}.{incarnation}.jsonl")
        with contextlib.closing(file):
            (file.replace if whole else file.append)(lines)

    def collect(self, name: str | None = None, *, alive: set[GroupId]) -> None:
        """Take in the journals of a dead instance, or of all (after a restart of the run)."""
        pattern = f"{name}.*.jsonl" if name is not None else "*.*.jsonl"
        for path in sorted(self._folder.glob(pattern)):
            if path in self._groups_of:
                continue
            requests = [r for r in read_journal(path) if r.id.group in alive]
            for request in requests:
                saved, found = self._saved.get(request.id), request_json(request)
                if saved is None or len(saved_ids(saved)) < len(saved_ids(found)):
                    self._saved[request.id] = found
            self._groups_of[path] = {request.id.group for request in requests}
        self._sweep()

    def look_up(self, request: RequestId) -> dict[str, Any] | None:
        """How far a request had come. Stays known: whoever continues it may die as well."""
        return self._saved.get(request)

    def token_ids(self, request: RequestId) -> list[int]:
        """Its response so far, with all of its branches."""
        return saved_ids(self._saved[request])

    def forget(self, group: GroupId, num_samples: int) -> None:
        for sample in range(num_samples):
            self._saved.pop(RequestId(group, sample), None)
        for groups in self._groups_of.values():
            groups.discard(group)
        self._sweep()

    def _sweep(self) -> None:
        for path in [path for path, groups in self._groups_of.items() if not groups]:
            path.unlink(missing_ok=True)
            del self._groups_of[path]
