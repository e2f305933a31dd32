"""NVIDIA's multi-process service for a run whose processes share one GPU.

Without it the driver gives the device to one process at a time (decoding and training together
then reach 0.93 of what each does alone); with it their kernels run side by side (1.10). The price:
a fault on the device in one process ends all of them, and the run goes on from its journals. So it
is asked for (`runtime.mps = true`), never assumed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile

from dora_rl.setup.devices import VISIBLE
from dora_rl.types import UserError

CONTROL = "nvidia-cuda-mps-control"
# Read when a process first touches CUDA.
PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
BELOW_NORMAL = "1"


class Mps:
    """A daemon of the run's own; processes started while it lives are its clients."""

    def __init__(self) -> None:
        if shutil.which(CONTROL) is None:
            raise UserError(f"runtime.mps: {CONTROL} is not installed; set runtime.mps = false")
        self._folder = tempfile.mkdtemp(prefix="dora-rl-mps-")
        names = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
        self._before = {name: os.environ.get(name) for name in names}
        for name, part in names.items():
            path = os.path.join(self._folder, part)
            os.mkdir(path)
            os.environ[name] = path
        # The daemon counts the GPUs anew from those it sees; workers name them as we do.
        env = {name: value for name, value in os.environ.items() if name != VISIBLE}
        done = subprocess.run([CONTROL, "-d"], capture_output=True, text=True, env=env)
        if done.returncode != 0:
            self.end()
            raise UserError(f"runtime.mps: {CONTROL} did not start: {done.stderr.strip()}")

    def end(self) -> None:
        subprocess.run([CONTROL], input="quit\n", capture_output=True, text=True, timeout=30)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(self._folder, ignore_errors=True)
