"""Follows one run in a thread and answers for its views. Readers see a consistent history.

    log ──LogTail──▶ History ──documents──▶ JSON text, kept until the history moves on
    metrics.jsonl ─────┘                     ▲
    audit process ───────── verdict ─────────┘

`revision` counts what changed; a page that knows it asks again only when it has moved.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dora_rl.dashboard import documents
from dora_rl.dashboard.run_files import RunFiles
from dora_rl.dashboard.timeline import Stays, timeline
from dora_rl.dashboard.verdict import Verdict
from dora_rl.observe.columns import LogTail
from dora_rl.observe.history import History
from dora_rl.observe.segments import SegmentReaders

POLL_S = 0.5
READING_S = 1.0  # between two views of a log that is being read
CACHED_MAX = 64


class Watcher:
    """`lock` is held while the history changes and while a document is made from it."""

    def __init__(
        self, run: Path, *, audit: bool = True, readers: SegmentReaders | None = None
    ) -> None:
        self.files = RunFiles(run)
        self.history = History()
        self.tail = LogTail(self.files.events, readers)
        self.revision = 0
        self.share_read = 0.0
        self.error = ""
        self.lock = threading.Lock()
        self.moved = threading.Condition()
        self.verdict: Verdict | None = None
        self._audit = audit
        self._asked = False
        self._stays: tuple[int, Stays] | None = None
        self._cached: dict[tuple[Any, ...], tuple[int, str]] = {}
        self._ending = threading.Event()
        self._heard: tuple[Any, str] = (None, "")  # the audit's word and the run's status
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(5.0)
        if self.verdict is not None:
            self.verdict.close()

    def _follow(self) -> None:
        while not self._ending.is_set():
            try:
                self.look()
                self.error = ""
            except Exception as error:  # noqa: BLE001 - whatever a damaged run may cause
                # The folder is gone or a line is damaged: the page says so and we look again.
                self.error = str(error)
                self._tell()
            self._ending.wait(POLL_S)

    def look(self) -> None:
        """Read what is new. The first look reads the whole log and tells how far it is."""
        size = max(1, self.files.log_bytes())
        for read in self.tail.columns():  # the long part, outside the lock
            if self._ending.is_set():
                return
            with self.lock:
                self.history.add(read)
                self.share_read = min(1.0, self.tail.num_bytes / size)
            self._tell()
        with self.lock:
            more = self.files.follow()
            first, self.share_read = self.share_read < 1.0, 1.0
        self._audit_on()
        said = (
            self.verdict.last if self.verdict else None,
            documents.status(self.history, self.files),
        )
        if more or first or said != self._heard:
            self._heard = said
            self._tell()

    def _audit_on(self) -> None:
        """Audit once somebody looks at the log, and again if a finished run went on."""
        if not (self._audit and self._asked):
            return
        verdict, entries = self.verdict, self.history.num_entries
        ended = verdict is not None and verdict.last["state"] == "whole"
        if verdict is None or (ended and verdict.last["num_entries"] < entries):
            self.verdict = Verdict(self.files.events)

    def _tell(self) -> None:
        with self.moved:
            self.revision += 1
            self.moved.notify_all()

    def wait(self, revision: int, timeout_s: float) -> int:
        """The revision, as soon as it is another one or the time is over."""
        with self.moved:
            self.moved.wait_for(lambda: self.revision != revision, timeout_s)
            return self.revision

    def pause(self, seconds: float) -> None:
        """Let time pass, but not past the end. While the log is read it is better left alone."""
        if self.share_read < 1.0:
            with self.moved:
                self.moved.wait_for(lambda: self.share_read == 1.0, READING_S)
        else:
            self._ending.wait(seconds)

    # -- documents --------------------------------------------------------------------------------

    def stays(self) -> Stays:
        if self._stays is None or self._stays[0] != self.history.num_entries:
            self._stays = (self.history.num_entries, Stays(self.history))
        return self._stays[1]

    def document(self, name: str, query: dict[str, str]) -> str | None:
        """The JSON text of a view, None if there is none of that name. A figure that is no number
        is null, as browsers want it."""
        if (make := self._views().get(name)) is None:
            return None
        key = (name, *sorted(query.items()))
        with self.lock:
            if (kept := self._cached.get(key)) is not None and kept[0] == self.revision:
                return kept[1]
            revision, text = self.revision, msgspec.json.encode(make(query)).decode()
            if len(self._cached) >= CACHED_MAX:
                self._cached.clear()
            self._cached[key] = (revision, text)
        return text

    def _views(self) -> dict[str, Callable[[dict[str, str]], Any]]:
        history, files = self.history, self.files
        return {
            "overview": lambda q: self._overview(),
            "config": lambda q: documents.configuration(files),
            "metrics": lambda q: documents.metrics(history, files),
            "distributions": lambda q: documents.distributions(history),
            "throughput": lambda q: documents.throughput(history, files, self.stays().columns),
            "timeline": self._timeline,
            "groups": self._groups,
            "group": lambda q: documents.one_group(
                history, files, _int(q, "group", -1), self.stays().columns
            ),
            "trajectory": lambda q: documents.trajectory(
                history, files, _int(q, "group", -1), _int(q, "sample", 0)
            ),
        }

    def headline(self) -> dict[str, Any]:
        """What a run is told by beside others."""
        with self.lock:
            figures = documents.headline(self.history, self.files)
        return figures | {"share_read": self.share_read, "error": self.error}

    def _overview(self) -> dict[str, Any]:
        self._asked = True
        waits = {"state": "reading" if self._audit else "off", "num_entries": 0}
        return documents.overview(self.history, self.files) | {
            "audit": self.verdict.last if self.verdict is not None else waits,
            "share_read": self.share_read,
            "error": self.error,
            "revision": self.revision,
            "made": time.time(),
        }

    def _timeline(self, query: dict[str, str]) -> dict[str, Any]:
        begin, end = _float(query, "begin", 0.0), _float(query, "end", self.history.now_s)
        width = max(100, min(4000, _int(query, "width", 1000)))
        return timeline(self.history, self.stays(), begin, end, width)

    def _groups(self, query: dict[str, str]) -> dict[str, Any]:
        return documents.group_list(
            self.history,
            self.files,
            query.get("state", ""),
            whole(query.get("version", "")),
            query.get("order", "newest"),
            _int(query, "page", 0),
            _int(query, "size", 50),
        )


def whole(text: str) -> int | None:
    """The number that a client wrote; None where it is none, or longer than any here."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,15}", text) else None


def _int(query: dict[str, str], name: str, default: int) -> int:
    found = whole(query.get(name, ""))
    return default if found is None else found


def _float(query: dict[str, str], name: str, default: float) -> float:
    try:
        return float(query.get(name, default))
    except ValueError:
        return default
