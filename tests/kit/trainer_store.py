"""An in-memory weight store: implements the port, keeps copies, seals with a checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from dora_rl.ports import Canary


@dataclass(frozen=True)
class Sealed:
    version: int
    checksum: str
    canary: Canary | None
    tensors: dict[str, torch.Tensor]

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class MemoryDraft:
    def __init__(self, store: MemoryStore, version: int) -> None:
        self.store, self.version = store, version
        self.tensors: dict[str, torch.Tensor] = {}

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.tensors.setdefault(name, torch.empty(tuple(shape), dtype=dtype))

    def seal(
        self, canary: Canary | None, base: str = "", ready: Callable[[], object] = lambda: None
    ) -> str:
        ready()
        return self.store.publish(self.version, self.tensors.items(), canary, base)

    def discard(self) -> None:
        self.tensors.clear()


class MemoryStore:
    def __init__(self) -> None:
        self.sealed: dict[int, Sealed] = {}
        self.opened: list[int] = []

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        canary: Canary | None = None,
        base: str = "",
    ) -> str:
        del base
        assert version not in self.sealed
        copies = {n: t.clone() for n, t in tensors}
        digest = hashlib.sha256()
        for tensor in copies.values():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.sealed[version] = Sealed(version, digest.hexdigest(), canary, copies)
        return digest.hexdigest()

    def draft(self, version: int, num_bytes: int = 0, pin: object = None) -> MemoryDraft:
        del num_bytes, pin
        return MemoryDraft(self, version)

    def open(self, version: int) -> Sealed:
        self.opened.append(version)
        return self.sealed[version]

    def retire(self, version: int) -> None:
        del self.sealed[version]

    def versions(self) -> Sequence[int]:
        return sorted(self.sealed)
