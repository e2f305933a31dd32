"""The sealed versions of a local run: in shared memory for the instances, on disk for resume.

Invariant: the disk holds every live version but, for a moment, the newest, those that wait for
their evaluation and the best one that has had it. Shared memory holds the live ones; what the disk
has of them can be made again and goes with the run, and what it has not stays for the resume.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from dora_rl.core.state import State
from dora_rl.types import UserError, Version
from dora_rl.weights.format import check_committed
from dora_rl.weights.leftovers import claim, owner_of, sweep
from dora_rl.weights.levels import Level, disk_level, is_one_place, lost_version, shared_level
from dora_rl.weights.proof import committed_checksums
from dora_rl.weights.store import (
    SHARED_MEMORY,
    DiskWeightStore,
    SharedMemoryWeightStore,
    WeightsCorrupt,
    WeightsError,
    copy_version,
    remember_root,
)


class Versions:
    """Both stores as the controller uses them."""

    def __init__(self, run_dir: Path, shared: Path) -> None:
        self._run_dir = run_dir
        remember_root(run_dir, shared)
        self._on_disk: Level = disk_level(run_dir)
        self._sealed: Level = shared_level(shared)
        self.disk, self.shared = self._on_disk.versions, self._sealed.versions
        if owner_of(shared) not in ("", str(run_dir.resolve())):
            self._sealed.forget_after(-1)  # of another run, which had the same `weights.root`
        self.to_retire: set[Version] = set()
        self._disk_only: set[Version] = set()  # retired, and pinned on the disk
        self._owner: int | None = None

    def hold(self) -> int:
        """Claim the shared store for this process; returns the bytes that dead runs had there."""
        self._owner = claim(self.shared.root, self._run_dir)
        return sweep(SHARED_MEMORY)

    def release(self) -> None:
        """The run has ended: shared memory is given back, but for a version that the learner had
        no time to write to the disk."""
        try:
            unsaved = self._sealed.newest() > self._on_disk.newest()
        except FileNotFoundError:
            unsaved = False  # the run directory was deleted or moved: nobody resumes it
        if not is_one_place(self._sealed, self._on_disk) and not unsaved:
            self.shared.destroy()
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def committed(self, state: State) -> dict[Version, str]:
        """The checksums that the log has of versions that may still be loaded."""
        wanted = {state.committed, *state.versions, *self.disk.versions()}
        return committed_checksums(self._run_dir, wanted)

    def lost(self, state: State, checksum: str = "") -> Version | None:
        """After a crash: the version to go back to, where the newest of the log was lost with its
        host before it was durable. `checksum`: what the log committed."""
        if not lost_version(self._sealed, self._on_disk, state.committed, checksum):
            return None
        durable = state.committed - 1
        if durable < state.durable or durable not in self.disk.versions():
            raise UserError(
                f"version {state.committed} is neither in {self.disk.root} nor in "
                f"{self.shared.root}, and there is no version {durable} to go back to: "
                "the run directory is damaged"
            )
        return durable

    def rewind(self, version: Version) -> None:
        """What is left of newer versions goes."""
        for level in (self._sealed, self._on_disk):
            level.forget_after(version)

    def keep_only(self, state: State, wanted: Collection[Version]) -> list[str]:
        """After a crash: what is neither live, nor newer than the log, nor wanted goes. What only
        shared memory has stays if it is newer than all that the disk has: the learner writes it.
        What is only wanted goes too where it is damaged; returns what there is to say about it."""
        notes: list[str] = []
        for version in self.disk.versions():
            live = version in state.versions or version >= state.committed
            damage = "" if live or version not in wanted else self._damage(version)
            if not live and (version not in wanted or damage):
                self.disk.retire(version)
            elif not live:
                self.to_retire.add(version)
            if damage:
                notes.append(f"{damage}; it is not needed to go on, and is removed")
        newest = self._on_disk.newest()
        only_shared = set(self.shared.versions()) - set(self.disk.versions())
        self.shared.discard(version for version in only_shared if version < newest)
        return notes

    def _damage(self, version: Version) -> str:
        try:
            self.disk.map(version).verify()
        except WeightsError as error:
            return str(error)
        return ""

    def check_log(self, state: State) -> None:
        """A version is in the log before the next one is sealed: where there is more, the end of
        the log is missing. What it does not know would be thrown away."""
        newest = max(self._sealed.newest(), self._on_disk.newest())
        batch = state.batches.get(state.committed)
        unlogged = newest == state.committed + 1 and batch is not None and batch.closed
        if newest > state.committed and not unlogged:
            raise UserError(
                f"{self._run_dir / 'events'} ends at version {state.committed} and version "
                f"{newest} is sealed: the end of the log is missing; restore it from a copy of the "
                f"run, or take the model with  dora-rl export {self._run_dir} OUT_DIR "
                f"--step {newest}"
            )

    def clear(self) -> None:
        """A new run: an interrupted one under the same name may have left its versions."""
        self.rewind(-1)

    def retire_all_but(self, pins: Collection[Version]) -> set[Version]:
        """Retire what is due: instances need it no more. On the disk it stays while it is pinned.

        Returns the versions that are new among the retired.
        """
        one_place = is_one_place(self._sealed, self._on_disk)
        gone, new = self.to_retire - set(pins), self.to_retire - self._disk_only
        for store, versions in (
            (self.shared, gone if one_place else self.to_retire),
            (self.disk, gone),
        ):
            store.discard(versions)
        self.to_retire -= gone
        self._disk_only = set(self.to_retire)
        return new

    def repair(self, version: Version, committed: str = "") -> bool:
        """Copy a version from the disk again if its shared copy is damaged or gone, or is not the
        one that the log committed.

        True if it was; raises `WeightsError` if the disk's copy is no better.
        """
        if version not in self.disk.versions():
            return False  # not sealed yet, or not on disk yet: it is tried again
        try:
            sealed = SharedMemoryWeightStore(self.shared.root).open(version)
            check_committed(sealed, committed)
            return False
        except WeightsError:
            self.shared.discard([version])
            disk = DiskWeightStore(self.disk.root)
            check_committed(disk.map(version), committed)
            share(disk, self.shared, version)
            return True


def share(
    disk: SharedMemoryWeightStore,
    shared: SharedMemoryWeightStore,
    version: Version,
) -> None:
    """Copy a version to shared memory. Controller and learner may both."""
    try:
        if version in shared.versions():
            shared.map(version)
    except WeightsError:  # damaged there
        shared.discard([version])
    try:
        copy_version(disk, shared, version)
    except WeightsCorrupt as error:
        hint = "restore it from a copy of the run, or begin a new run"
        raise WeightsCorrupt(f"{error}; {hint}") from error
