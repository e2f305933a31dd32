"""Where metrics go beside metrics.jsonl: a tracking service, or a file of the user's, if asked for.

Each sink works in a thread of its own behind a bounded queue, so that a slow or hanging service
never holds up the run. A sink that fails is reported once and is off from then on; the run and the
other sinks go on. Packages are imported only for the sinks that are named in `logging.sinks`.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from dora_rl.controller.sink_writers import WRITERS, RunFacts, Writer
from dora_rl.types import UserError
from dora_rl.user_code import load_object

LINES_MAX = 1_000  # waiting for one sink; more are left out and reported
CLOSE_S = 15.0


def check_sinks(names: Sequence[str]) -> None:
    """Before anything starts: is there a package, or a file of the user's, for each sink?"""
    for name in names:
        writer_of(name)
        if name in WRITERS and importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.sinks: {name} is not installed; pip install {name}, "
                "or take it out of the list"
            )


def writer_of(name: str) -> Callable[[RunFacts], Writer]:
    """What writes to a service, or what the user names as `path/to/file.py:Name`."""
    if name in WRITERS:
        return WRITERS[name]
    if ":" not in name:
        known = ", ".join(WRITERS)
        raise UserError(f"logging.sinks: {name} is none of {known}, nor path/to/file.py:Name")
    found = load_object(name, Path("."), section="logging", key="logging.sinks")
    if not callable(found):
        raise UserError(f"logging.sinks: {name} is not a class; see docs/extending.md")
    return cast(Callable[[RunFacts], Writer], found)


class Sinks:
    """All sinks of a run. `tell` gets one line about a sink that failed."""

    def __init__(
        self,
        names: Sequence[str],
        facts: RunFacts,
        tell: Callable[[str], None],
        find: Callable[[str], Callable[[RunFacts], Writer]] = writer_of,
    ) -> None:
        self._sinks = [_Sink(name, find(name), facts, tell) for name in dict.fromkeys(names)]

    def write(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl: of a step (it has `step`) or of an evaluation (`version`)."""
        for sink in self._sinks:
            sink.put(line)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let every sink finish what it has; one that does not in time is left behind."""
        for sink in self._sinks:
            sink.end()
        for sink in self._sinks:
            sink.join(timeout_s)


class _Sink:
    def __init__(
        self,
        name: str,
        make: Callable[[RunFacts], Writer],
        facts: RunFacts,
        tell: Callable[[str], None],
    ) -> None:
        self._name, self._make, self._facts, self._tell = name, make, facts, tell
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(LINES_MAX)
        self._off = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, line: dict[str, Any]) -> None:
        """The service is opened with the first line: a run that fails to start leaves no trace."""
        if self._off.is_set():
            return
        if self._thread is None:
            name = f"sink {self._name}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(dict(line))
        except queue.Full:
            self._fail(f"takes nothing any more ({LINES_MAX} lines wait for it)")

    def end(self) -> None:
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            self._fail(f"takes nothing any more ({LINES_MAX} lines wait for it)")

    def join(self, timeout_s: float) -> None:
        if self._off.is_set() or self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"was not done {timeout_s:.0f} s after the end")

    def _work(self) -> None:
        try:
            writer = self._make(self._facts)
            while not self._off.is_set():
                line = self._lines.get()
                if line is None:
                    writer.close()
                    return
                writer.write(line)
        except Exception as error:  # noqa: BLE001 - a tracking service may raise anything
            first = next(iter(str(error).splitlines()), "")
            self._fail(f"failed: {type(error).__name__}: {first}")

    def _fail(self, why: str) -> None:
        if not self._off.is_set():
            self._off.set()
            self._tell(f"logging.sinks: {self._name} {why}; it is off, the run goes on")
