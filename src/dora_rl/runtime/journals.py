"""What instances had generated when they died: their token journals, ready to continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dora_rl.engine.journal import read_journal, request_json
from dora_rl.types import GroupId, RequestId


class Journals:
    """Read when an instance is gone; a request is handed out once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved: dict[RequestId, dict[str, Any]] = {}

    def collect(self, name: str | None = None) -> None:
        """Take in the journals of a dead instance, or of all (after a restart of the run)."""
        pattern = f"{name}.*.jsonl" if name is not None else "*.jsonl"
        for path in sorted(self._folder.glob(pattern)):
            for request in read_journal(path):
                saved = self._saved.get(request.id)
                if saved is None or len(saved["resume_ids"]) < len(request.resume_ids):
                    self._saved[request.id] = request_json(request)
            path.unlink()

    def take(self, request: RequestId) -> dict[str, Any] | None:
        return self._saved.pop(request, None)

    def forget(self, group: GroupId, num_samples: int) -> None:
        for sample in range(num_samples):
            self._saved.pop(RequestId(group, sample), None)
