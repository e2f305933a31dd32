"""The audit of the run being looked at, in a process of its own: it reads every line.

Started by the dashboard; prints the verdict so far as a line of JSON, again whenever the log has
grown, and ends when the run has or when nobody reads any more. Runs with low priority.

    python -m dora_rl.dashboard.verdict RUN/events
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dora_rl.observe.audit import Auditor
from dora_rl.observe.columns import LogTail
from dora_rl.observe.eventlog import parse_line

EVERY_S = 2.0
FINDINGS_SHOWN = 50


class Verdict:
    """Starts the audit and holds its last word."""

    def __init__(self, events: Path) -> None:
        self.last: dict[str, Any] = {"state": "reading", "num_entries": 0}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dora_rl.dashboard.verdict", str(events)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the dashboard's alone
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last = json.loads(line)
        if self.last["state"] == "reading":
            self.last = {**self.last, "state": "stopped"}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(5.0)
        self._thread.join(5.0)


def watch(events: Path) -> None:
    """Audit the log as it grows."""
    auditor, tail = Auditor(), LogTail(events)
    told = 0.0
    while True:
        for chunk in tail.chunks():
            for line in chunk.splitlines(keepends=True):
                if (record := parse_line(line)) is None:
                    _tell(auditor, "damaged")
                    return
                auditor.chain.see(line)
                auditor.see(record)
                if time.monotonic() - told > EVERY_S:
                    told = time.monotonic()
                    _tell(auditor, "reading")
        if auditor.stop is not None and auditor.stop.done:
            _tell(auditor, "whole")
            return
        _tell(auditor, "so far")
        time.sleep(EVERY_S)


def _tell(auditor: Auditor, state: str) -> None:
    """Findings so far; what only the end of a run can show is looked at when it has ended."""
    notes = auditor.findings
    if state == "whole":
        auditor.report()
    found = [
        {"promise": f.promise.value, "subject": f.subject, "message": f.message, "entry": f.entry}
        for f in notes.kept[:FINDINGS_SHOWN]
    ]
    print(
        json.dumps(
            {
                "state": state,
                "num_entries": notes.entry + 1,
                "num_findings": notes.num,
                "findings": found,
            }
        ),
        flush=True,
    )


def main() -> None:
    os.nice(10)
    try:
        watch(Path(sys.argv[1]))
    except BrokenPipeError:
        os._exit(0)  # the dashboard is gone


if __name__ == "__main__":
    main()
