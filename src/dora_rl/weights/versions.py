"""The sealed versions of a local run: on disk for resume, in shared memory for the instances.

Invariant: the disk holds every live version, those that wait for their evaluation and the best one
that has had it; shared memory is a copy of the live ones that can be made again, and goes with the
run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from dora_rl.core.state import State
from dora_rl.types import Version
from dora_rl.weights.leftovers import claim, sweep
from dora_rl.weights.store import (
    SHARED_MEMORY,
    DiskWeightStore,
    SharedMemoryWeightStore,
    VersionExists,
    VersionMissing,
    WeightsError,
    copy_version,
)
from dora_rl.weights.writer import CopyFailed


class Versions:
    """Both stores as the controller uses them."""

    def __init__(self, disk: Path, shared: Path) -> None:
        self.disk = DiskWeightStore(disk)
        self.shared = SharedMemoryWeightStore(shared)
        self.to_retire: set[Version] = set()
        self._disk_only: set[Version] = set()  # retired, and pinned on the disk
        self._owner: int | None = None

    def hold(self) -> int:
        """Claim the shared store for this process; returns the bytes that dead runs had there."""
        self._owner = claim(self.shared.root)
        return sweep(SHARED_MEMORY)

    def release(self) -> None:
        """The run has ended: shared memory is given back."""
        # A machine without shared memory has both in one place.
        if self.shared.root.resolve() != self.disk.root.resolve():
            self.shared.destroy()
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def keep_only(self, state: State, wanted: Collection[Version]) -> None:
        """After a crash: what is neither live, nor newer than the log, nor wanted goes."""
        for version in self.disk.versions():
            live = version in state.versions or version >= state.committed
            if not live and version not in wanted:
                self.disk.retire(version)
            elif not live:
                self.to_retire.add(version)
        for version in set(self.shared.versions()) - set(self.disk.versions()):
            self.shared.retire(version)

    def clear(self) -> None:
        """A new run: an interrupted one under the same name may have left its versions."""
        for store in (self.shared, self.disk):
            for version in store.versions():
                store.retire(version)

    def retire_all_but(self, pins: Collection[Version]) -> set[Version]:
        """Retire what is due: instances need it no more. On the disk it stays while it is pinned.

        Returns the versions that are new among the retired.
        """
        # A machine without shared memory has both in one place.
        one_place = self.shared.root.resolve() == self.disk.root.resolve()
        gone, new = self.to_retire - set(pins), self.to_retire - self._disk_only
        for store, versions in (
            (self.shared, gone if one_place else self.to_retire),
            (self.disk, gone),
        ):
            for version in versions:
                with contextlib.suppress(VersionMissing):
                    store.retire(version)
        self.to_retire -= gone
        self._disk_only = set(self.to_retire)
        return new

    def repair(self, version: Version) -> bool:
        """Copy a version from the disk again if its shared copy is damaged or gone.

        True if it was; raises `WeightsError` if the disk's copy is no better.
        """
        if version not in self.disk.versions():
            return False  # not sealed yet
        try:
            SharedMemoryWeightStore(self.shared.root).open(version)
            return False
        except WeightsError:
            with contextlib.suppress(VersionMissing):
                self.shared.retire(version)
            share(DiskWeightStore(self.disk.root), self.shared, version)
            return True


def share(
    disk: SharedMemoryWeightStore,
    shared: SharedMemoryWeightStore,
    version: Version,
) -> str:
    """Copy a version to shared memory; returns its checksum. Controller and learner may both."""
    try:
        return copy_version(disk, shared, version)
    except VersionExists:
        checksum = disk.checksum(version)
        if shared.checksum(version) != checksum:
            raise
        return checksum  # the other one was faster


class MirroredDisk(DiskWeightStore):
    """The learner's disk store: what it publishes goes to shared memory in the same pass over the
    tensors, sealed there when it is sealed on disk. `share` finds that copy, or makes it."""

    def __init__(self, root: str | Path, mirror: SharedMemoryWeightStore) -> None:
        super().__init__(root)
        self._mirror = mirror

    @contextmanager
    def _copying(self, version: Version) -> Iterator[Path | None]:
        if self.root.resolve() == self._mirror.root.resolve():
            yield None
            return
        published = False
        try:
            with self._mirror.receiving(version) as copy:
                try:
                    yield copy
                except CopyFailed as failed:
                    raise failed.error from failed  # shared memory's, and told as such
                published = True
        except VersionExists:
            if not published:
                raise
