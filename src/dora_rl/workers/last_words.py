"""Why a worker ended, in one line: what it said itself, or what the system says of its process.

No room on a disk is recognised anywhere, told in one line, and never the end of the work:
everything on disk is written so that a half-written end is cut off or ignored by the next start.

Tracebacks of the user's rewards, environments, agents and losses go from the workers to a file:

    worker --UserRaised--> controller --> RUN/user_errors.log

A worker sends a traceback once and then only its number. The file has each place once, with how
often it raised.

Invariant: whoever runs out of memory is told so, with the numbers, wherever the words come from;
the size of the file is bounded, however often and in how many places code raises.
"""

from __future__ import annotations

import errno
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dora_rl.io.append_log import replace_text
from dora_rl.io.system_errors import is_memory
from dora_rl.store.table import TableError
from dora_rl.user_code import Listener, one_line, origin_of, trace_of
from dora_rl.weights.store import WeightsError, WeightsFull
from dora_rl.workers.messages import Send, UserRaised

ENDED = "its process ended"
_SIZE = r"([\d.]+ [KMGT]i?B)"
_CUDA = {
    "wanted": re.compile(rf"Tried to allocate {_SIZE}"),
    "total": re.compile(rf"total capacity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "held": re.compile(rf"this process has {_SIZE} memory in use"),
}
_HOST = re.compile(r"tried to allocate (\d+) bytes")
_ON_GPU = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Failed to CUDA calloc")
ROOM_ON_GPU = (
    "lower rollout.kv_bytes_max or trainer.pack_tokens, "
    'or set trainer.activation_checkpointing = "layer"'
)
ROOM_ON_HOST = "free memory on this machine, or lower trainer.pack_tokens and rollout.kv_bytes_max"


def last_words(error: BaseException) -> str:
    """An error as the reason for the end of a process."""
    text = str(error)
    if "CUDA out of memory" in text or any(sign in text for sign in _ON_GPU):
        return _out_of_gpu_memory(text)
    wanted = _HOST.search(text)
    if is_memory(error):
        much = f": {int(wanted[1]) / 2**30:.2f} GiB more were wanted" if wanted else ""
        return f"out of memory on the host{much}; {ROOM_ON_HOST}"
    return one_line(error)


def _out_of_gpu_memory(text: str) -> str:
    found = {name: match[1] for name, p in _CUDA.items() if (match := p.search(text))}
    parts = [f"{found['wanted']} more were wanted"] if "wanted" in found else []
    if "free" in found and "total" in found:
        parts.append(f"{found['free']} of {found['total']} are free")
    if "held" in found:
        parts.append(f"this process has {found['held']}")
    numbers = f": {', '.join(parts)}" if parts else ""
    return f"out of memory on the GPU{numbers}; {ROOM_ON_GPU}"


def why_ended(said: str, status: int | None) -> str:
    """What the worker said, or its process's exit status (negative: the signal that ended it)."""
    if said:
        return said
    if status is None or status >= 0:
        return ENDED
    name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"{ENDED} by {name}{hint}"


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK_ERRORS = (OSError, TableError, WeightsError)  # what writing may raise; ask `is_full` then


def is_full(error: BaseException | None) -> bool:
    """Whether this error, or the one that caused it, says that there was no room."""
    # Libraries that write for us (safetensors) give the system's words without its number.
    words = [f"{word} {number}" for word in ("os error", "code:") for number in FULL]
    while error is not None:
        told = isinstance(error, OSError) and error.errno in FULL
        if told or isinstance(error, WeightsFull) or any(word in str(error) for word in words):
            return True
        error = error.__cause__
    return False


def full_line(run_dir: str | Path, error: BaseException, *others: str | Path) -> str:
    """What happened, where, and what to do. `others`: where else it writes, such as memory."""
    if isinstance(error, WeightsFull):
        return str(error)
    places = [place for place in (run_dir, *others) if Path(place).exists()]
    fullest = min(places, key=lambda place: shutil.disk_usage(place).free, default=run_dir)
    where = getattr(error, "filename", None) or fullest
    free = shutil.disk_usage(where if Path(where).exists() else run_dir).free >> 20
    return f"no room to write {where} ({free} MiB free on its disk); make room and --resume"


# -- what the user's code raised -------------------------------------------------------------------

FILE = "user_errors.log"
PLACES_MAX = 50  # further ones are counted
BEFORE_CHARS_MAX = 65_536  # kept of what stood in the file before a resume
RESUMED = "######## before the last resume\n"


def send_user_errors(send: Send) -> Listener:
    """A worker's listener."""
    sent: set[str] = set()

    def tell(what: str, error: BaseException) -> None:
        place, trace = origin_of(error), ""
        if place not in sent and len(sent) < PLACES_MAX:
            sent.add(place)
            trace = trace_of(error)
        send(UserRaised(what, place, one_line(error), trace))

    return tell


@dataclass(slots=True)
class Place:
    what: str
    worker: str
    trace: str
    first: str
    count: int = 0


class UserErrors:
    """The file of one run. `add` and `close` write it; `tell` is called once for every place."""

    def __init__(self, run_dir: Path, tell: Callable[[str], None]) -> None:
        self.path = run_dir / FILE
        self.num = 0
        self._tell = tell
        self._places: dict[str, Place] = {}
        self._next_write = 1
        before = self.path.read_text(errors="replace") if self.path.is_file() else ""
        self._before = before[:BEFORE_CHARS_MAX]

    def add(self, worker: str, said: UserRaised) -> None:
        """A worker's message."""
        self.num += 1
        known = self._places.get(said.place)
        if known is None and said.trace and len(self._places) < PLACES_MAX:
            first = time.strftime("%Y-%m-%d %H:%M:%S")
            known = Place(said.what, worker, said.trace, first)
            self._places[said.place] = known
            self._next_write = self.num
            self._tell(f"{said.what} raised {said.line}; traceback in {self.path}")
        if known is not None:
            known.count += 1
        if self.num >= self._next_write:
            self._write()
            self._next_write = 2 * self.num

    def _write(self) -> None:
        parts = [
            f"==== {p.count} times, {p.what} ({p.worker}), first at {p.first}\n{p.trace}\n\n"
            for p in self._places.values()
        ]
        if elsewhere := self.num - sum(place.count for place in self._places.values()):
            parts.append(f"==== {elsewhere} times elsewhere\n\n")
        before = RESUMED + self._before if self._before else ""
        replace_text(self.path, "".join(parts) + before, errors="replace")

    def close(self) -> None:
        if self.num:
            self._write()
