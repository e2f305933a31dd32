"""The two levels of a version: sealed in shared memory, then durable on disk.

    shared memory   root/00000003   root/masters/00000003             sealed: outlives every process
    disk            run/weights/00000003   run/learner/masters/00000003   durable: outlives the host

A level holds a version and, in a store of its own, what makes the learner's masters exact (the low
halves of the float32 masters, critic, counters, generators). Both are checksummed.

Never changes what is sealed. Invariants: in each level a version is there only if what belongs to
it is; what is on disk is byte for byte what was sealed; at most the newest version is in shared
memory alone, because no other is sealed before it is durable. Where both levels are one place (a
machine without shared memory) a version is sealed when it is durable.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dora_rl.types import Version
from dora_rl.weights.format import WeightsError, check_committed
from dora_rl.weights.private import NotPrivate
from dora_rl.weights.store import (
    DiskWeightStore,
    SharedMemoryWeightStore,
    VersionExists,
    copy_version,
)

MASTERS = "masters"


@dataclass(frozen=True, slots=True)
class Level:
    """Where versions are, and what makes them exact."""

    versions: SharedMemoryWeightStore
    masters: SharedMemoryWeightStore

    def newest(self) -> Version:
        return max(self.versions.versions(), default=-1)

    def holds_whole(self, version: Version, committed: str = "") -> bool:
        """Whether every byte of it is what was sealed, and what the log committed."""
        try:
            check_committed(self.versions.map(version), committed)
            for store in (self.masters, self.versions):
                store.map(version).verify()
        except (WeightsError, NotPrivate):
            return False
        return True

    def forget_masters_before(self, version: Version) -> None:
        """Only the newest version is ever gone on from."""
        self.masters.discard(older for older in self.masters.versions() if older < version)

    def forget_after(self, version: Version) -> None:
        for store in (self.versions, self.masters):
            store.discard(newer for newer in store.versions() if newer > version)


def shared_level(root: str | Path) -> Level:
    root = Path(root)
    return Level(SharedMemoryWeightStore(root), SharedMemoryWeightStore(root / MASTERS))


def disk_level(run_dir: Path) -> Level:
    masters = DiskWeightStore(run_dir / "learner" / MASTERS)
    return Level(DiskWeightStore(run_dir / "weights"), masters)


def is_one_place(shared: Level, disk: Level) -> bool:
    return shared.versions.root.resolve() == disk.versions.root.resolve()


def make_durable(shared: Level, disk: Level, version: Version) -> None:
    """Put on disk what is sealed, both files at once: one writer does not fill a fast disk. Every
    byte is hashed on the way: what was damaged since is not written. Doing it again is fine,
    whoever did it before."""
    if is_one_place(shared, disk):
        return
    if version not in disk.versions.versions():
        with ThreadPoolExecutor(1, thread_name_prefix="durable-masters") as beside:
            masters = beside.submit(_copy, shared.masters, disk.masters, version)
            _copy(shared.versions, disk.versions, version, masters.result)
    disk.forget_masters_before(version)


def _copy(
    source: SharedMemoryWeightStore,
    target: SharedMemoryWeightStore,
    version: Version,
    wait: Callable[[], object] = lambda: None,
) -> None:
    try:
        copy_version(source, target, version, wait)
    except VersionExists:
        target.retire(version)  # what a life left that ended before it sealed this version
        copy_version(source, target, version, wait)


def lost_version(shared: Level, disk: Level, committed: Version, checksum: str) -> bool:
    """Whether a committed version is nowhere any more: its host was lost before it was durable."""
    if committed in disk.versions.versions() or is_one_place(shared, disk):
        return False
    return not shared.holds_whole(committed, checksum)
