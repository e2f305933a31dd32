"""Memory of a device, played by that of this process."""

from __future__ import annotations

import torch


class Played:
    """Memory by name, as another process would find it."""

    made: dict[str, torch.Tensor]

    def __init__(self, name: str = "card") -> None:
        self.made, self.name, self.num_opened = {}, name, 0

    def make(self, num_bytes: int) -> tuple[torch.Tensor, str]:
        name = f"memory {len(self.made)}"
        self.made[name] = torch.zeros(num_bytes, dtype=torch.uint8)
        return self.made[name], name

    def open(self, name: str, num_bytes: int) -> torch.Tensor:
        self.num_opened += 1
        assert self.made[name].numel() == num_bytes
        return self.made[name]

    def device(self) -> str:
        return self.name
