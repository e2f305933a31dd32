"""Per-request state that lives on the device, so that decoding needs no host between two steps.

One entry per engine slot: the last token, the next position, the random key, the temperature, the
adapter and the block table. The extra last slot is a dummy for padding rows: position 0, scrap
block, never advanced. The host writes an entry when a request enters a slot or its blocks change;
the sampling kernel advances it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dora_rl.engine.plan import Span
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.types import Version

NUM_STRETCHES = 4
STRETCH_BYTES = 2 << 20
ALIGN = 64
BURSTS = 4  # of the greatest length, whose results have places of their own


class Staging:
    """Pinned host memory for the small arrays that go to and from the device in a step. A tensor
    is the taker's until the fourth `turn` after it was taken.

    torch's own cache of pinned memory asks the driver about every block that it gave out before, at
    each new one. Here a step has a stretch of memory of its own, which is used again some steps
    later, once everything that was sent from it has arrived.
    """

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


class DeviceSlots:
    """The arrays, and what the host knows of them."""

    def __init__(
        self, num_slots: int, blocks_max: int, scrap_block: int, device: str, burst_max: int = 1
    ) -> None:
        self.num_slots = num_slots
        self._device = device
        count = num_slots + 1
        self.last_token = torch.zeros(count, dtype=torch.int64, device=device)
        self.position = torch.zeros(count, dtype=torch.int32, device=device)
        self.key = torch.zeros(count, dtype=torch.int64, device=device)
        self.prompt = torch.zeros(count, dtype=torch.int32, device=device)
        self.temperature = torch.ones(count, dtype=torch.float32, device=device)
        self.adapter = torch.zeros(count, dtype=torch.int64, device=device)  # slot, under LoRA
        self.table = torch.full((count, blocks_max), scrap_block, dtype=torch.int32, device=device)
        # Which sequence an entry's token and position belong to, and up to which position.
        self._synced: list[tuple[Seq | None, int]] = [(None, -1)] * count
        # Passes since it was last zeroed: where what a pass draws is written.
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.steps_max = BURSTS * burst_max
        self._num_begun = 0
        self._staging = Staging() if device != "cpu" else None
        self._aside = torch.cuda.Stream(device) if device != "cpu" else None

    def begin(self, repeat: int) -> int:
        """What `step` is before the next `repeat` passes."""
        if self._num_begun + repeat > self.steps_max:
            if self._aside is not None:  # the places are used again: their copies must be done
                torch.cuda.current_stream().wait_stream(self._aside)
            self.step.zero_()
            self._num_begun = 0
        self._num_begun += repeat
        return self._num_begun - repeat

    def lose_count(self) -> None:
        """Passes have run that were not begun."""
        self._num_begun = self.steps_max

    def turn(self) -> None:
        """A step begins: see `Staging`."""
        if self._staging is not None:
            self._staging.turn()

    def upload(self, values: object, dtype: torch.dtype) -> Tensor:
        """A small host array on the device, without waiting for the copy."""
        array = np.asarray(values)
        if self._staging is None:
            return torch.as_tensor(array).to(dtype)
        host = self._staging.take(array.shape, dtype)
        host.numpy()[...] = array
        return host.to(self._device, non_blocking=True)

    def download(self, data: Tensor) -> Tensor:
        """Start copying to the host; complete once an event behind it has passed, and to be read
        before the fourth `turn` from now."""
        if self._staging is None:
            return data.clone()
        return self._staging.take(data.shape, data.dtype).copy_(data, non_blocking=True)

    def download_aside(self, data: Tensor) -> Tensor:
        """The same beside the current stream: what is launched next does not wait for the copy.
        Complete once `finished` has passed."""
        if self._aside is None:
            return self.download(data)
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            return self.download(data)

    def finished(self) -> torch.cuda.Event:
        """Passes when everything launched until now is done, copies too."""
        assert self._aside is not None
        self._aside.wait_stream(torch.cuda.current_stream())
        event = torch.cuda.Event()
        event.record(self._aside)
        return event

    def update(self, spans: Sequence[Span], adapters: Mapping[Version, int] | None = None) -> None:
        """Bring entries up to date for requests that entered a slot or got new blocks."""
        fresh = [span.seq for span in spans if span.seq.slot_dirty]
        if fresh:
            slots = self.upload([seq.slot for seq in fresh], torch.int64)
            self.key[slots] = self.upload([seq.key for seq in fresh], torch.int64)
            self.prompt[slots] = self.upload([seq.num_prompt for seq in fresh], torch.int32)
            temperatures = [seq.request.params.temperature for seq in fresh]
            self.temperature[slots] = self.upload(temperatures, torch.float32)
            if adapters is not None:
                mine = [adapters[seq.version] for seq in fresh]
                self.adapter[slots] = self.upload(mine, torch.int64)
        moved = [span.seq for span in spans if span.seq.table_dirty]
        if moved:
            width = max(len(seq.blocks) for seq in moved)
            rows = np.zeros((len(moved), width), np.int32)
            for row, seq in enumerate(moved):
                rows[row, : len(seq.blocks)] = seq.blocks
                seq.table_dirty = False
            slots = self.upload([seq.slot for seq in moved], torch.int64)
            self.table[slots, :width] = self.upload(rows, torch.int32)
        for seq in fresh:
            seq.slot_dirty = False
            # What rows beyond an earlier turn's end left there may be at the very position.
            self._synced[seq.slot] = (None, -1)

    def sync_tokens(self, spans: Sequence[Span]) -> None:
        """Give decode rows their token where the device does not hold it already."""
        stale = [s for s in spans if self._synced[s.seq.slot] != (s.seq, s.start)]
        if stale:
            slots = self.upload([s.seq.slot for s in stale], torch.int64)
            tokens = [s.seq.tokens[s.start] for s in stale]
            self.last_token[slots] = self.upload(tokens, torch.int64)
            self.position[slots] = self.upload([s.start for s in stale], torch.int32)

    def mark(self, spans: Sequence[Span], repeat: int = 1) -> None:
        """These spans drew on the device: their newest token is the input at their end position."""
        for span in spans:
            self.mark_at(span.seq, span.start + span.num_rows + repeat - 1)

    def mark_at(self, seq: Seq, position: int) -> None:
        """The device has its token at this position."""
        self._synced[seq.slot] = (seq, position)
