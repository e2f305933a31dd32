"""Which snapshots are in the engine's weight slots, and which has to make way for another.

Pure: it decides, and is told what was done. A snapshot is used by running requests and is never
taken away under them. One that somebody waits for gets the slot of the snapshot that was used
least recently; where all are in use, the one that has been there longest takes no new requests
until it is free. Invariants: at most `slots` snapshots are resident, loading or leaving; whoever
waits gets a slot after finitely many requests of others end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dora_rl.types import Version


class Load(NamedTuple):
    """Make `version` resident, after `evict` has left its slot."""

    version: Version
    evict: Version | None


@dataclass(slots=True)
class Resident:
    uses: int = 0
    ready: bool = False
    used_at: int = 0
    closing: bool = False  # somebody waits for its slot


class Residents:
    """`want` for each request until it may run, `leave` when it has ended."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held: dict[Version, Resident] = {}
        self._count = 0

    def versions(self) -> tuple[Version, ...]:
        return tuple(self._held)

    def want(self, version: Version) -> Load | bool:
        """True: it is there and counts as used. `Load`: that must be done first. False: wait."""
        self._count += 1
        held = self._held.get(version)
        if held is not None:
            if not held.ready or (held.closing and held.uses):
                return False
            held.closing = False  # it is free, and nobody has taken its slot
            held.uses += 1
            held.used_at = self._count
            return True
        evict = None
        if len(self._held) >= self._slots:
            free = [v for v, r in self._held.items() if r.ready and not r.uses]
            if not free:
                self._close_oldest()
                return False
            evict = min(free, key=lambda v: (not self._held[v].closing, self._held[v].used_at))
            del self._held[evict]
        self._held[version] = Resident()
        return Load(version, evict)

    def loaded(self, version: Version) -> None:
        self._held[version].ready = True
        self._held[version].used_at = self._count

    def failed(self, version: Version) -> None:
        """It could not be loaded; its slot is free."""
        del self._held[version]

    def leave(self, version: Version) -> None:
        """A request on it has ended."""
        held = self._held[version]
        held.uses -= 1
        assert held.uses >= 0

    def forget(self, version: Version) -> bool:
        """It is wanted no more. True: it was resident and unused, and has left its slot."""
        held = self._held.get(version)
        if held is None or held.uses or not held.ready:
            return False
        del self._held[version]
        return True

    def _close_oldest(self) -> None:
        """The first of all is the one that has been there longest."""
        if not any(held.closing for held in self._held.values()):
            for held in self._held.values():
                if held.ready:
                    held.closing = True
                    return
