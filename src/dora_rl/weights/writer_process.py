"""Hashing and writing of versions in a process of its own.

The learner's interpreter is busy launching work on its device, and every thread beside that waits
for its turn hundreds of times in a version of some gigabytes. Here nothing but the bytes is to be
waited for. Both sides see the same shared memory and the same disk; what goes to and fro are lines
of JSON that name files.

Never decides what is written, or when. The process ends with its owner, wherever it is: a version
that it was writing has no name yet, and whoever comes next removes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

from dora_rl.types import Version
from dora_rl.weights.format import WeightsCorrupt, WeightsError
from dora_rl.weights.levels import disk_level, make_durable, shared_level
from dora_rl.weights.store import VersionExists, VersionMissing, WeightsFull
from dora_rl.weights.writer import Range, digests_of

ERRORS = {
    kind.__name__: kind
    for kind in (WeightsError, WeightsCorrupt, WeightsFull, VersionExists, VersionMissing)
}
END_S = 10.0


class WriterProcess:
    """The owner's side. Any thread may ask, and waits for its own answer. `keep`: descriptors that
    stay open as long as the process does, such as a lock."""

    def __init__(self, keep: Sequence[int] = ()) -> None:
        command = [sys.executable, "-P", "-m", "dora_rl.weights.writer_process"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=keep
        )
        self._numbers = count()
        self._lock = threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, name="weights-answers", daemon=True).start()

    def digests(self, path: Path, ranges: Sequence[Range]) -> list[str]:
        return self._ask("digests", path=str(path), ranges=list(ranges))

    def make_durable(self, shared: Path, run_dir: Path, version: Version) -> None:
        self._ask("make_durable", shared=str(shared), run_dir=str(run_dir), version=version)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(END_S)

    def _ask(self, what: str, **how: Any) -> Any:
        stdin, answer = self._process.stdin, Future[Any]()
        assert stdin is not None
        with self._lock:
            number = next(self._numbers)
            self._asked[number] = answer
            try:
                stdin.write(json.dumps([number, what, how]).encode() + b"\n")
                stdin.flush()
            except (OSError, ValueError):
                raise self._ended() from None
        return answer.result()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, error, result = json.loads(line)
            with self._lock:
                answer = self._asked.pop(number)
            if error is None:
                answer.set_result(result)
            else:
                kind, text = error
                answer.set_exception(ERRORS.get(kind, OSError)(text))
        with self._lock:
            asked, self._asked = self._asked, {}
        for answer in asked.values():
            answer.set_exception(self._ended())

    def _ended(self) -> WeightsError:
        status = self._process.wait(END_S)
        return WeightsError(f"the process that writes versions has ended (status {status})")


# -- the process ----------------------------------------------------------------------------------


def answer(what: str, how: dict[str, Any]) -> Any:
    if what == "digests":
        return digests_of(Path(how["path"]), [(begin, end) for begin, end in how["ranges"]])
    assert what == "make_durable", what
    shared, disk = shared_level(how["shared"]), disk_level(Path(how["run_dir"]))
    make_durable(shared, disk, how["version"])
    return None


def serve(asked: Any, told: Any) -> None:
    """Every question in a thread of its own, until nobody can ask any more."""
    lock = threading.Lock()

    def work(number: int, what: str, how: dict[str, Any]) -> None:
        said: list[Any] = []
        try:
            said = [number, None, answer(what, how)]
        except (WeightsError, OSError) as error:
            said = [number, [type(error).__name__, str(error)], None]
        finally:
            if not said:  # our own mistake: nobody waits for an answer that never comes
                traceback.print_exc()
                os._exit(1)
        with lock:
            told.write(json.dumps(said).encode() + b"\n")
            told.flush()

    for line in asked:
        threading.Thread(target=work, args=json.loads(line), daemon=True).start()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # whatever is being written
