"""How much of the time a GPU computes nothing, as the driver counts it; never touches the run.

`utilization.gpu` is the share of the last sample period in which at least one kernel ran, whoever
launched it: one minus its mean is the idle ratio of the device.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from bisect import bisect_left, bisect_right

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
