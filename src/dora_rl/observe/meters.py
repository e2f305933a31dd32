"""How busy the cores and the GPUs of a run are. Sampled from outside; never touches the run.

Of the cores: how many each process of a run uses, and how often none of them computes at all. Of a
GPU: how much of the time it computes nothing, as the driver counts it. `utilization.gpu` is the
share of the last sample period in which at least one kernel ran, whoever launched it: one minus its
mean is the idle ratio of the device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from pathlib import Path

LOOK_S = 0.05
LOOKS_PER_SAMPLE = 5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuMeter(threading.Thread):
    """CPU seconds of a run's processes by role, sampled; a process that ends keeps its figure."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self._roles: dict[int, str] = {}
        self.samples: list[tuple[float, dict[int, float]]] = []
        self.looks: list[tuple[float, bool]] = []  # was any thread running?

    def run(self) -> None:
        last: dict[int, float] = {}
        alive: list[int] = []
        while not self._ended.wait(LOOK_S):
            if len(self.looks) % LOOKS_PER_SAMPLE == 0:
                now = _cpu_of_tree(self._pid)
                last, alive = last | now, list(now)
                for pid in last:
                    self._learn_role(pid)
                self.samples.append((time.monotonic(), last))
            self.looks.append((time.monotonic(), any(map(_is_running, alive))))

    def _learn_role(self, pid: int) -> None:
        """A worker that has just been forked still writes where the controller does."""
        known = self._roles.get(pid, "ended")
        if known == "ended" or (known == "controller" and pid != self._pid):
            found = _role(pid)
            self._roles[pid] = known if found == "ended" else found

    def end(self) -> None:
        self._ended.set()
        self.join()

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Cores in use, on average, by each role in a stretch of monotonic time."""
        times = [sample[0] for sample in self.samples]
        # From the last sample before to the first one after: the stretch may be shorter than a
        # sample's period.
        first = max(0, bisect_right(times, begin) - 1)
        last = min(len(times) - 1, bisect_left(times, end))
        if last <= first:
            return {}
        (t0, before), (t1, after) = self.samples[first], self.samples[last]
        used: defaultdict[str, float] = defaultdict(float)
        for pid, cpu_s in after.items():
            used[self._roles[pid]] += (cpu_s - before.get(pid, 0.0)) / (t1 - t0)
        return dict(used)

    def still_between(self, begin: float, end: float) -> float | None:
        """The share of looks at which no thread of the run was on a core or waited for one."""
        ran = [running for at, running in self.looks if begin <= at <= end]
        return 1 - sum(ran) / len(ran) if ran else None


def _is_running(pid: int) -> bool:
    try:
        tasks = list(os.scandir(f"/proc/{pid}/task"))
        stats = (Path(task.path, "stat").read_text() for task in tasks)
        return any(stat.rpartition(")")[2].split()[0] == "R" for stat in stats)
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended while we looked


def _role(pid: int) -> str:
    """A worker writes to logs/NAME.log; the controller to train.log."""
    try:
        name = Path(os.readlink(f"/proc/{pid}/fd/1")).stem
    except OSError:
        return "ended"
    return "controller" if name == "train" else name


def _cpu_of_tree(root: int) -> dict[int, float]:
    """CPU seconds of `root` and of every process below it."""
    parents: dict[int, int] = {}
    cpu: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                rest = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            pid = int(entry.name)
            parents[pid] = int(rest[1])
            cpu[pid] = (int(rest[11]) + int(rest[12])) / TICKS_PER_S

    def is_below(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return {pid: cpu_s for pid, cpu_s in cpu.items() if is_below(pid)}


PERIOD_MS = 100


class GpuMeter(threading.Thread):
    """Samples the busiest GPU that the run can see, until it is ended."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(daemon=True)
        self._times: list[float] = []
        self._busy: list[float] = []
        self._process = subprocess.Popen(
            [
                "nvidia-smi",
                f"--id={index}",
                "--query-gpu=utilization.gpu",
                "--format=csv,noheader,nounits",
                f"--loop-ms={PERIOD_MS}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self._busy.append(int(line) / 100)
                self._times.append(time.monotonic())

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()
        self.join()

    def idle_ratio(self, begin: float = 0.0, end: float = float("inf")) -> float | None:
        """In a stretch of monotonic time; None where nothing was sampled in it."""
        inside = self._busy[bisect_left(self._times, begin) : bisect_right(self._times, end)]
        return 1 - sum(inside) / len(inside) if inside else None


def start_meter(device: str) -> GpuMeter | None:
    """A running meter for a CUDA device, where the driver's tool is there."""
    if not device.startswith("cuda") or shutil.which("nvidia-smi") is None:
        return None
    meter = GpuMeter(int(device.partition(":")[2] or 0))
    meter.start()
    return meter
