"""The GPU of a run on this machine: shared by its processes if asked for, and metered."""

from __future__ import annotations

from dora_rl.observe.gpu_meter import start_meter
from dora_rl.setup.mps import Mps


class GpuUse:
    """From the start of a run to its end; nothing at all on a CPU."""

    def __init__(self, device: str, *, mps: bool) -> None:
        self._mps = Mps() if mps and device != "cpu" else None
        self._meter = start_meter(device)

    def end(self, since_s: float | None, until_s: float) -> float | None:
        """The idle ratio in the training time, where the run used a GPU."""
        if self._mps is not None:
            self._mps.end()
        if self._meter is None:
            return None
        self._meter.end()
        return self._meter.idle_ratio(since_s, until_s) if since_s else None
