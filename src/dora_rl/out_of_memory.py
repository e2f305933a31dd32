"""Memory that runs out: how an error says so, and how a test has one raised in a real worker.

Imports no torch. `DORA_RL_MEMORY_FAULTS` names places that fail, for tests of whole runs alone:

    DORA_RL_MEMORY_FAULTS="learner:pack:3 instance:launch:20 evaluator:launch:5"

The third pack of the learner raises what torch raises, and so on: role, place, number of the call.
Each process counts for itself, and each entry fails once. The places are the calls of `maybe_fail`.
Invariant: without the variable, or outside of a worker, nothing fails.
"""

from __future__ import annotations

import os
import sys
from collections import Counter

VARIABLE = "DORA_RL_MEMORY_FAULTS"
PLACES = ("pack", "score", "twin", "launch", "load")
# How libraries below torch's allocator say it.
SIGNS = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "can't allocate memory",
)
REASON_CHARS = 240


def shortage(error: BaseException) -> str:
    """What was missing, in a line; empty: memory was not the reason. A loss of the user's own
    raises it as the cause of its own error."""
    for found in (error, error.__cause__):
        text = str(found)
        if type(found).__name__ == "OutOfMemoryError" or any(sign in text for sign in SIGNS):
            return " ".join(text.split())[:REASON_CHARS] or "out of memory"
    return ""


def free_cached() -> None:
    """Give back what torch's allocator holds on to and nobody uses."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Faults:
    """Which calls of this process fail."""

    def __init__(self, role: str, wanted: str) -> None:
        entries = [entry.split(":") for entry in wanted.split()]
        for _, place, _ in entries:
            assert place in PLACES, f"{VARIABLE}: {place} is none of {', '.join(PLACES)}"
        self._at = {(place, int(number)) for who, place, number in entries if who == role}
        self._calls: Counter[str] = Counter()

    def count(self, place: str) -> None:
        """Raises what torch does, if this call is to fail."""
        self._calls[place] += 1
        if (place, self._calls[place]) in self._at:
            import torch

            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate 2.00 GiB (a fault that {VARIABLE} asks for)"
            )


_armed: Faults | None = None


def arm(role: str) -> None:
    """Called by a worker at its start."""
    global _armed
    wanted = os.environ.get(VARIABLE, "")
    _armed = Faults(role, wanted) if wanted else None


def maybe_fail(place: str) -> None:
    if _armed is not None:
        _armed.count(place)
