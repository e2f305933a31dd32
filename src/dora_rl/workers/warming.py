"""What an instance does while it waits for its first weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Warm(Protocol):
    """An engine, as far as it matters here."""

    def warm_up(self, plain: bool) -> Iterator[None]: ...
    def versions(self) -> tuple[int, ...]: ...


class Warming:
    """Has an engine compile and capture, a part at a time, until a version is resident: from then
    on nobody waits for what may never be needed."""

    def __init__(self, engine: Warm, plain: bool) -> None:
        self._engine = engine
        self._parts: Iterator[None] | None = engine.warm_up(plain)

    def part(self) -> bool:
        """Do one; False if there was none to do."""
        if self._parts is not None and not self._engine.versions():
            for _ in self._parts:
                return True
        self._parts = None
        return False
