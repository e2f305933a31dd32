"""Where the documents of one pack begin and end, on the device, made once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

# A document joins a bucket if it is at least this long relative to the bucket's longest. The
# padding this allows costs attention only, and less than the calls it saves.
_BUCKET_FILL_MIN = 0.9

_Plan = TypeVar("_Plan")


def send(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To the device. A GPU copies from pinned memory, so that nobody waits for what it is doing."""
    if device.type != "cuda":
        return data.to(device)
    return data.pin_memory().to(device, non_blocking=True)


class Layout:
    """Lengths, positions and cumulative lengths of a pack, and what backends derive from them."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        assert lengths and all(n > 0 for n in lengths)
        self.lengths = tuple(lengths)
        self.device = device
        self.length_max = max(lengths)
        self.num_tokens = sum(lengths)
        counts = torch.tensor(self.lengths)
        ends = counts.cumsum(0)
        starts = ends - counts
        self.starts: list[int] = starts.tolist()
        self.document_T = send(torch.repeat_interleave(counts), device)
        position = torch.arange(self.num_tokens) - starts.repeat_interleave(counts)
        self.position_T = send(position, device)
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        self.cu_lengths = send(cu.to(torch.int32), device)
        self._plans: dict[Any, Any] = {}

    def plan(self, make: Callable[[Layout], _Plan]) -> _Plan:
        """What a backend derives from the layout, made on first use."""
        if make not in self._plans:
            self._plans[make] = make(self)
        return self._plans[make]

    def bucket_members(self) -> list[list[int]]:
        """Documents of similar length together, longest first."""
        order = sorted(range(len(self.lengths)), key=lambda d: (-self.lengths[d], d))
        buckets: list[list[int]] = []
        for d in order:
            if buckets and self.lengths[d] >= _BUCKET_FILL_MIN * self.lengths[buckets[-1][0]]:
                buckets[-1].append(d)
            else:
                buckets.append([d])
        return buckets
