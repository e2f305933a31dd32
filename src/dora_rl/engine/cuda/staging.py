"""Pinned host memory for the small arrays that go to and from the device in a step.

torch's own cache of pinned memory asks the driver about every block that it gave out before, at
each new one. Here a step has a stretch of memory of its own, which is used again some steps later,
once everything that was sent from it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_STRETCHES = 4
STRETCH_BYTES = 2 << 20
ALIGN = 64


class Staging:
    """Hands out pinned tensors. One is the taker's until the fourth `turn` after it was taken."""

    def __init__(self) -> None:
        shape = (NUM_STRETCHES, STRETCH_BYTES)
        self._memory = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._left: list[torch.cuda.Event | None] = [None] * NUM_STRETCHES
        self._now = self._used = 0

    def turn(self) -> None:
        """A step begins. Copies to the device are on the current stream; what was copied to the
        host has been read by the time its memory is used again."""
        event = self._left[self._now] or torch.cuda.Event()
        event.record()
        self._left[self._now] = event
        self._now, self._used = (self._now + 1) % NUM_STRETCHES, 0
        event = self._left[self._now]
        if event is not None:
            event.synchronize()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Not initialised; where the stretch is full, memory of torch's own."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        start = self._used
        if start + size > STRETCH_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        self._used = -(-(start + size) // ALIGN) * ALIGN
        return self._memory[self._now, start : start + size].view(dtype).view(*shape)
