"""Before a learner starts: what was sealed becomes durable, and what is there is whole.

The newest version on the disk is compared with the log and with its own digests. What is damaged is
copied again from shared memory, or, of the masters, taken from the checkpoint of that version; or
else one line says which file it is and what can still be done.

Never goes on from bytes that nobody vouches for. Invariant: what `ready_newest` leaves on the disk
as the newest version is what the log committed, or newer than the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dora_rl.trainer.checkpoints.digests import check_saved
from dora_rl.types import UserError, Version
from dora_rl.weights.format import WeightsError, check_committed
from dora_rl.weights.levels import Level, is_one_place, make_durable
from dora_rl.weights.private import NotPrivate
from dora_rl.weights.proof import committed_checksums
from dora_rl.weights.store import SharedMemoryWeightStore


def ready_newest(shared: Level, disk: Level, run_dir: Path, checkpoints: Path) -> list[str]:
    """Returns what there is to say about it."""
    there = {*shared.versions.versions(), *disk.versions.versions()}
    committed = committed_checksums(run_dir, there)
    notes = [] if is_one_place(shared, disk) else _finish_sealed(shared, disk, committed)
    return notes + _mend_newest(shared, disk, committed, checkpoints)


def _finish_sealed(shared: Level, disk: Level, committed: Mapping[Version, str]) -> list[str]:
    """What the life before sealed and had no time to write is made durable. What is not whole, or
    not what the log committed, is as good as never sealed."""
    for version in [v for v in shared.versions.versions() if v > disk.newest()]:
        try:
            check_committed(shared.versions.map(version), committed.get(version, ""))
            make_durable(shared, disk, version)
        except (WeightsError, NotPrivate) as error:
            shared.forget_after(version - 1)
            return [f"version {version} in shared memory cannot be used: {error}"]
    return []


def _mend_newest(
    shared: Level, disk: Level, committed: Mapping[Version, str], checkpoints: Path
) -> list[str]:
    version = disk.newest()
    known = committed.get(version, "")
    of_weights, of_masters = _damage(disk.versions, version, known), _damage(disk.masters, version)
    damage = of_weights or of_masters
    if damage is None:
        return []
    if not is_one_place(shared, disk) and shared.holds_whole(version, known):
        disk.forget_after(version - 1)
        make_durable(shared, disk, version)
        return [f"{damage}; restored from shared memory"]
    if of_weights is not None:
        raise UserError(f"{damage}; restore it from a copy of the run, or begin a new run")
    checkpoint = checkpoints / f"step_{version - 1:06d}"
    try:
        check_saved(checkpoint)
    except UserError:
        raise UserError(
            f"{damage}; restore it from a copy of the run, or delete {disk.masters.root} to go on "
            "from the published weights: what rounding took from the masters is lost then"
        ) from None
    disk.masters.retire(version)
    return [f"{damage}; {checkpoint} has the same masters, and is used"]


def _damage(
    store: SharedMemoryWeightStore, version: Version, committed: str = ""
) -> WeightsError | None:
    """What is wrong with a version that is there."""
    try:
        if version in store.versions():
            check_committed(store.open(version), committed)
    except WeightsError as error:
        return error
    return None
