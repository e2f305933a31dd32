"""Watching a run from outside until nothing of it is left, and judging how it ended.

Memory, CPU time and output are summed over all processes of the run; passing a bound kills its
init, and with that everything. Invariant: `until_ended` returns only when the run is dead.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from dora_rl.rewards.sandbox.dialog import Dialog
from dora_rl.rewards.sandbox.limits import End, Limits, Run

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WATCHED_MAX = 4096
# The first look comes soon, because memory fills at gigabytes a second; then ever rarer.
TICK_S_MIN, TICK_S_MAX = 0.01, 0.04
GRACE_S = 2.0  # for init to report after the wall limit

Process = tuple[int, int]  # its number, which may come again, and when it began


class Meter(Protocol):
    """Knows what a run has used: a control group, or `Tree`."""

    def passed(self, limits: Limits) -> End | None: ...


class Tree:
    """All processes below `pid`, as /proc shows them. Memory that no process has in its tables is
    not seen, which is why the filter lets no program have such memory (see `seccomp`). Where a
    parent ignores the end of its children, their time is what the last look at them saw."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[Process, int] = {}

    def passed(self, limits: Limits) -> End | None:
        cpu_s, memory_bytes, own = usage_of(self._pid)
        self._seen |= own
        cpu_s = max(cpu_s, sum(self._seen.values()) / TICKS_PER_S)
        if memory_bytes > limits.memory_total_bytes_max:
            return End.MEMORY
        return End.CPU if cpu_s > limits.cpu_s else None


def until_ended(
    pidfd: int, outputs: Sequence[int], limits: Limits, meter: Meter, dialog: Dialog
) -> End | None:
    """Why we killed it, or None if it ended by itself (or by its own init, for time)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    listening = dialog.waiting
    if listening:
        poll.register(dialog.answers_fd, select.POLLIN)
    begin_s, tick_s = time.monotonic(), TICK_S_MIN
    reason: End | None = None
    while True:
        ended = any(fd == pidfd for fd, _ in poll.poll(tick_s * 1000))
        heard = dialog.step()
        if ended:
            return reason if heard else reason or End.OUTPUT
        if listening and not dialog.waiting:
            # From now on once a tick is enough, however often it writes.
            poll.unregister(dialog.answers_fd)
            listening = False
        tick_s = min(tick_s * 1.5, TICK_S_MAX)
        if reason is None:
            reason = _passed_bound(outputs, limits, meter) if heard else End.OUTPUT
            if reason is None and time.monotonic() - begin_s > limits.wall_s + GRACE_S:
                reason = End.TIME
        if reason is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _passed_bound(outputs: Sequence[int], limits: Limits, meter: Meter) -> End | None:
    if any(os.fstat(fd).st_size > limits.output_bytes_max for fd in outputs):
        return End.OUTPUT
    return meter.passed(limits)


def usage_of(pid: int) -> tuple[float, int, dict[Process, int]]:
    """CPU seconds and resident bytes of the tree below `pid`, and the ticks of each process alone.
    What ends meanwhile is left out; its parent counts its time, unless it ignores its children."""
    ticks, pages, num_seen = 0, 0, 0
    own: dict[Process, int] = {}
    waiting = [pid]
    while waiting and num_seen < WATCHED_MAX:
        process = waiting.pop()
        place = f"/proc/{process}"
        num_seen += 1
        with suppress(FileNotFoundError, ProcessLookupError):
            # Fields after the command name, which may hold spaces and brackets.
            fields = Path(place, "stat").read_bytes().rpartition(b")")[2].split()
            pages += int(Path(place, "statm").read_bytes().split()[1])
            ticks += sum(map(int, fields[11:15]))
            own[process, int(fields[19])] = sum(map(int, fields[11:13]))
            for thread in os.listdir(f"{place}/task"):
                waiting += map(int, Path(place, "task", thread, "children").read_bytes().split())
    return ticks / TICKS_PER_S, pages * PAGE_BYTES, own


def read_status(pipe: int) -> dict[str, Any]:
    """What init wrote before it ended; empty if it did not."""
    os.set_blocking(pipe, False)
    text = b""
    with suppress(BlockingIOError):
        while more := os.read(pipe, 65536):
            text += more
    try:
        return json.loads(text) if text else {}
    except ValueError:
        # It was killed while it wrote.
        return {}


def read_text(fd: int, bytes_max: int) -> str:
    return os.pread(fd, bytes_max, 0).decode(errors="replace")


def verdict(
    report: Mapping[str, Any],
    stopped: End | None,
    over: bool,
    texts: Sequence[str],
    limits: Limits,
    wall_s: float,
    dialog: Dialog,
) -> Run:
    stdout, stderr = texts
    status = report.get("exit")
    number = report.get("signal", 0)
    end = stopped or _end(report, stderr, dialog.came_to_end())
    if over and stopped is None:
        end = End.OUTPUT
    return Run(
        end=end,
        exit_status=status if isinstance(status, int) else -number,
        stdout=stdout,
        stderr=stderr,
        wall_s=wall_s,
        cpu_s=report.get("cpu_s", 0.0),
        answers=dialog.answers(),
    )


def _end(report: Mapping[str, Any], stderr: str, came_to_end: bool) -> End:
    if not report:
        return End.LOST
    last = stderr.rstrip().rpartition("\n")[2]
    ends = (
        (report["signal"] == signal.SIGXCPU, End.CPU),
        (report["signal"], End.SIGNAL),
        (report["exit"] is None, End.TIME),
        (report["exit"] == 0, End.OK if came_to_end else End.LEFT),
        (last.startswith("MemoryError"), End.MEMORY),
    )
    return next((end for is_so, end in ends if is_so), End.FAILED)
