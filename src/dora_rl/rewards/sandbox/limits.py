"""What a run may use, what it is asked, how it ended, what it left: the sandbox's own values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run. Memory of one process is a hard limit. The totals over all processes of
    a run (CPU seconds, memory) are kept by a control group, or watched every few milliseconds."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes_max: int = 512 << 20
    memory_total_bytes_max: int = 1 << 30
    processes_max: int = 32  # threads count
    output_bytes_max: int = 1 << 20  # of stdout, and of stderr
    answers_bytes_max: int = 8 << 20  # of all answers together
    files_bytes_max: int = 32 << 20  # in /tmp, and in /dev/shm
    open_files_max: int = 64


class End(StrEnum):
    """How a run ended."""

    OK = "ok"  # exit status 0, at the interpreter's own end
    LEFT = "left"  # exit status 0 without coming to that end: os._exit, or another program
    FAILED = "failed"  # an exception, or another exit status
    SIGNAL = "signal"  # killed by a signal of its own making
    TIME = "time"
    CPU = "cpu"
    MEMORY = "memory"
    OUTPUT = "output"
    LOST = "lost"  # no report: it attacked its supervisor, or the machine is in trouble


@dataclass(frozen=True, slots=True)
class Ask:
    """What a program is asked once its own code is through: the value of an expression in its
    scope, or to run statements there."""

    code: str
    value: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """`done`: nothing was raised. `value` is plain data, or a `values.Opaque` for what is none."""

    done: bool
    value: object = None


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome. `answers[i]` belongs to ask i; None: it never came, or could not be read."""

    end: End
    exit_status: int
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float
    answers: tuple[Answer | None, ...] = ()
