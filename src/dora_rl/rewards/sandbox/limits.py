"""What a run may use, how it ended, what it left: the values the sandbox speaks in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run. Memory of one process is a hard limit; the totals over all processes of
    a run (CPU seconds, memory) are watched every few milliseconds."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes_max: int = 512 << 20
    memory_total_bytes_max: int = 1 << 30
    processes_max: int = 32  # threads count
    output_bytes_max: int = 1 << 20  # of stdout, and of stderr
    files_bytes_max: int = 32 << 20  # in /tmp, and in /dev/shm
    open_files_max: int = 64


class End(StrEnum):
    """How a run ended."""

    OK = "ok"  # exit status 0
    FAILED = "failed"  # an exception, or another exit status
    SIGNAL = "signal"  # killed by a signal of its own making
    TIME = "time"
    CPU = "cpu"
    MEMORY = "memory"
    OUTPUT = "output"
    LOST = "lost"  # no report: it attacked its supervisor, or the machine is in trouble


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome. `passed[i]`: test i ran without raising."""

    end: End
    exit_status: int
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float
    passed: tuple[bool, ...] = ()
