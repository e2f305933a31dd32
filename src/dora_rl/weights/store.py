"""The weight store of one host: sealed versions as files in shared memory.

A version is opened from any process by (root, number).

Never changes a version after publication, never shows half of one, never pickles. Invariant: a
version is visible exactly when its directory carries its final name, and that name appears by one
atomic rename after every byte and the manifest are written.

    root/.lock               held for the moment a temporary directory is made or cleaned
    root/.new-00000003-…     being written; its own lock says that the writer is alive
    root/00000002/           sealed: model.safetensors (mapped by readers) and manifest.json
    root/.old-00000001-…     retired; readers that have it mapped keep their pages
    root/.spare              memory of a retired version that nobody has mapped, to be filled again

Shared memory is open to every user of a host: a root there is its user's alone (`private`), has a
name that nobody can know before, and what another user owns or may change is refused.

Whoever has a version of shared memory mapped holds a shared lock on its file; memory is filled
again only by who has that lock alone. A writer that dies leaves a `.new-` directory without a lock
holder; the next store that is made on the same root removes it. The same class with `durable=True`
keeps versions on a disk for resume.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.config import WeightsConfig
from dora_rl.io.append_log import flush
from dora_rl.ports import Canary
from dora_rl.types import Version
from dora_rl.weights.format import (
    MANIFEST_FILE,
    NUM_THREADS,
    TENSORS_FILE,
    Manifest,
    SealedFile,
    WeightsCorrupt,
    WeightsError,
    read_manifest,
)
from dora_rl.weights.leftovers import SPARE, store_name
from dora_rl.weights.private import check_own, held, lock_now, open_own, private_folder, problem_of
from dora_rl.weights.writer import (
    HEADER_ROOM_BYTES,
    LARGE_BYTES,
    LARGE_HEADER_BYTES,
    Digests,
    DraftFiles,
    Memory,
    Pin,
    copy_durable,
    digests_of,
    fill,
    new_memory,
    spare_memory,
    write_durable,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "DiskWeightStore",
    "SealedFile",
    "SharedMemoryWeightStore",
    "VersionExists",
    "VersionMissing",
    "WeightsCorrupt",
    "WeightsError",
    "WeightsFull",
    "copy_version",
    "remember_root",
    "shared_memory_root",
]

SHARED_MEMORY = Path("/dev/shm")
ROOT_FILE = ".shared-memory"  # of a run directory: the name of its place there
_numbers = count()  # of what this process writes


class VersionExists(WeightsError):
    """The version was published before; a number is used once."""


class VersionMissing(WeightsError):
    """The version was never published here, or is retired."""


class WeightsFull(WeightsError):
    """No room for the version. The store is as it was before the attempt."""


class SharedMemoryWeightStore:
    """Implements `ports.WeightStore`. Cheap to make; every process makes its own on the same root.

    store = SharedMemoryWeightStore("/dev/shm/run-1")
    store.publish(0, model.state_dict().items())
    weights = store.open(0)            # in any process
    for name in weights.names(): copy(weights.tensor(name))
    """

    def __init__(
        self,
        root: str | Path,
        *,
        durable: bool = False,
        verify: bool = True,
        threads: int = NUM_THREADS,
    ) -> None:
        """`threads` hash and copy a version that is published here."""
        self.root = Path(root)
        self.durable, self.threads = durable, threads
        self.digests: Digests = partial(digests_of, threads=threads)  # who hashes what is new
        self._verify = verify
        # Keyed by the file's stamp too, so that a file that was touched is hashed again.
        self._verified: set[tuple[Version, tuple[int, ...]]] = set()
        self._pinned: dict[int, Memory] = {}  # what a GPU knows of, by inode, used or resting
        self._header_bytes = HEADER_ROOM_BYTES  # as much as the versions so far needed
        if durable:
            self.root.mkdir(parents=True, exist_ok=True)
        else:
            private_folder(self.root)
        self._clean()

    def publish(
        self,
        version: Version,
        tensors: Iterable[tuple[str, Tensor]],
        canary: Canary | None = None,
        base: str = "",
        make_way: Callable[[], object] | None = None,
    ) -> str:
        """Write all tensors, seal, return the checksum. All or nothing. `make_way`: for others who
        need the disk, see `write_durable`."""
        with self.receiving(version) as directory:
            if self.durable:
                parts = (directory, version, tensors, canary, base, self.threads)
                manifest = write_durable(*parts, make_way)
            else:
                manifest = self._copy(directory, version, tensors, canary, base)
        return manifest.checksum

    def _copy(
        self,
        directory: Path,
        version: Version,
        tensors: Iterable[tuple[str, Tensor]],
        canary: Canary | None,
        base: str,
    ) -> Manifest:
        with closing(self.begin(directory, version)) as files:
            fill(files, tensors, self.threads)
            return files.finish(canary, base, self.digests)

    def draft(self, version: Version, num_bytes: int = 0, pin: Pin | None = None) -> Draft:
        """Room for a version whose tensors come later. `num_bytes`: about as much as it will need;
        `pin`: see `Memory`."""
        return Draft(self, version, num_bytes, pin)

    def take_in(self, sealed: SealedFile, wait: Callable[[], object] = lambda: None) -> None:
        """Publish a copy of a version that another store has, if it is what was published. It is
        sealed when `wait` has returned."""
        version = sealed.version
        with self.receiving(version) as directory:
            if self.durable:
                copy_durable(sealed, directory, self.threads)
            else:
                parts = (sealed.tensors(), sealed.canary, sealed.base)
                copied = self._copy(directory, version, *parts)
                if copied.checksum != sealed.checksum:
                    raise WeightsCorrupt(
                        f"version {version}: {sealed.path} changed after publication; not copied"
                    )
            wait()

    @contextmanager
    def receiving(self, version: Version) -> Iterator[Path]:
        """A directory to be filled with the two files of a version, then sealed."""
        with self.new_directory(version) as directory:
            yield directory
            self.seal(directory, version)

    def begin(
        self, directory: Path, version: Version, num_bytes: int = 0, pin: Pin | None = None
    ) -> DraftFiles:
        """In memory that was used before, where there is some."""
        path, memory = directory / TENSORS_FILE, None
        with contextlib.suppress(FileNotFoundError):
            (self.root / SPARE).rename(path)
            memory = self._used_before(path, pin)
            if memory is None:
                path.unlink()
        memory = memory or new_memory(path, num_bytes, pin)
        self.forget_gone()
        if memory.is_pinned:
            self._pinned[path.stat().st_ino] = memory
        large = LARGE_HEADER_BYTES if num_bytes >= LARGE_BYTES else 0
        return DraftFiles(directory, version, memory, max(self._header_bytes, large))

    def sealed_with(self, manifest: Manifest) -> None:
        """What a version was like: the next one is as a rule the same."""
        self._header_bytes = max(self._header_bytes, manifest.data_start)

    def _used_before(self, path: Path, pin: Pin | None) -> Memory | None:
        known = self._pinned.pop(path.stat().st_ino, None)
        if known is not None:
            if known.take():
                return known
            known.close()
        return spare_memory(path, pin)

    def forget_gone(self) -> None:
        """Memory of versions that are retired: what is mapped is not given back."""
        for number, memory in list(self._pinned.items()):
            if memory.is_gone():
                del self._pinned[number]
                memory.close()

    def open(self, version: Version) -> SealedFile:
        """Map the version. Its bytes are hashed the first time this store object opens it."""
        sealed = self.map(version)
        if self._verify and (version, sealed.stamp) not in self._verified:
            sealed.verify()
            self._verified.add((version, sealed.stamp))
        return sealed

    def map(self, version: Version) -> SealedFile:
        """Map the version without hashing it, for those who hash what they read."""
        directory = self._directory(version)
        if not self.durable:
            check_own(directory, directory / MANIFEST_FILE, directory / TENSORS_FILE)
        try:
            return SealedFile(directory, version, lock=not self.durable)
        except FileNotFoundError as error:
            if directory.exists():
                message = f"version {version}: {error.filename} is gone"
                raise WeightsCorrupt(message) from error
            raise VersionMissing(
                f"version {version} is not in {self.root} (it has {list(self.versions())})"
            ) from error

    def pinned(self, sealed: SealedFile) -> Any:
        """The bytes of a version, as far as a GPU of this process knows them; not to be written to.
        None where it does not."""
        memory = self._pinned.get(sealed.stamp[0])
        return None if memory is None else memory.pinned()

    def retire(self, version: Version) -> None:
        """Forget the version. Readers that have it mapped keep reading it."""
        grave = self.root / f".old-{version:08d}-{os.getpid()}"
        try:
            self._directory(version).rename(grave)
        except FileNotFoundError as error:
            raise VersionMissing(f"version {version} is not in {self.root}") from error
        # Another process may be cleaning at the same moment; a rest is cleaned with the next store.
        with contextlib.suppress(FileNotFoundError):
            self._keep_memory(grave / TENSORS_FILE)
        shutil.rmtree(grave, ignore_errors=True)

    def discard(self, versions: Iterable[Version]) -> None:
        """As `retire`, of many; some may be gone already."""
        for version in versions:
            with contextlib.suppress(VersionMissing):
                self.retire(version)

    def _keep_memory(self, path: Path) -> None:
        """Of a retired version that nobody has mapped, for the next one."""
        spare = self.root / SPARE
        if self.durable or spare.exists():
            return
        with held(os.open(path, os.O_RDONLY)) as handle:
            if lock_now(handle):  # else somebody reads it
                os.fchmod(handle, 0o600)
                path.rename(spare)

    def versions(self) -> Sequence[Version]:
        """The sealed versions, oldest first."""
        return sorted(int(entry.name) for entry in self.root.iterdir() if entry.name.isdigit())

    def checksum(self, version: Version) -> str:
        """What was published, from the manifest alone; no tensor is read."""
        try:
            return read_manifest(self._directory(version), version).checksum
        except FileNotFoundError as error:
            raise VersionMissing(f"version {version} is not in {self.root}") from error

    def destroy(self) -> None:
        """Remove the whole store, at the end of a run that needs no resume from it."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _directory(self, version: Version) -> Path:
        return self.root / f"{version:08d}"

    @contextmanager
    def new_directory(self, version: Version) -> Iterator[Path]:
        """A private directory, locked while we live, gone afterwards whatever happens."""
        assert version >= 0, f"version {version} is negative"
        if self._directory(version).exists():
            raise VersionExists(f"version {version} is already published in {self.root}")
        directory = self.root / f".new-{version:08d}-{os.getpid()}-{next(_numbers)}"
        with self._store_lock():
            directory.mkdir(mode=0o700)  # nobody else may open it before it is locked
            handle = os.open(directory, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.fchmod(handle, stat.S_IMODE(self.root.stat().st_mode) & 0o777)
        try:
            yield directory
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            shutil.rmtree(directory, ignore_errors=True)
            raise WeightsFull(self._full_message(version)) from error
        finally:
            os.close(handle)
            shutil.rmtree(directory, ignore_errors=True)

    def seal(self, directory: Path, version: Version) -> None:
        if self.durable:
            flush(directory)
        try:
            directory.rename(self._directory(version))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            message = f"version {version} is already published in {self.root}"
            raise VersionExists(message) from error
        if self.durable:
            flush(self.root)

    def _full_message(self, version: Version) -> str:
        usage, what = (
            shutil.disk_usage(self.root),
            "enlarge it (docker: --shm-size) or set weights.root",
        )
        if self.durable:
            what = "free some, or move the run directory to another disk and resume there"
        return (
            f"no room for version {version} in {self.root}: {usage.free >> 20} of "
            f"{usage.total >> 20} MiB are free; {what}"
        )

    @contextmanager
    def _store_lock(self) -> Iterator[None]:
        with held(open_own(self.root / ".lock")) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _clean(self) -> None:
        """Remove what dead writers and interrupted retirements left behind."""
        with self._store_lock():
            for entry in self.root.iterdir():
                if entry.name.startswith(".old-") or (
                    entry.name.startswith(".new-") and not _is_locked(entry)
                ):
                    shutil.rmtree(entry, ignore_errors=True)


class Draft:
    """A version on its way into a store. Implements `ports.Draft`. On its way to a disk it waits in
    the memory of this process: a disk is written in order. Whatever goes wrong leaves the store as
    it was."""

    def __init__(
        self,
        store: SharedMemoryWeightStore,
        version: Version,
        num_bytes: int,
        pin: Pin | None,
    ) -> None:
        self.version, self._store = version, store
        self._held: list[tuple[str, Tensor]] = []
        self._files: DraftFiles | None = None
        self._closing = contextlib.ExitStack()
        with self._closing:
            self._directory = self._closing.enter_context(store.new_directory(version))
            if not store.durable:
                self._files = store.begin(self._directory, version, num_bytes, pin)
                self._closing.callback(self._files.close)
            self._closing = self._closing.pop_all()

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The memory of a tensor, to be filled before `seal`."""
        import torch

        if self._files is not None:
            place = torch.from_numpy(self._files.room(name, shape, dtype))
            return place.view(dtype).view(tuple(shape))
        self._held.append((name, torch.empty(tuple(shape), dtype=dtype)))
        return self._held[-1][1]

    def seal(
        self, canary: Canary | None, base: str = "", ready: Callable[[], object] = lambda: None
    ) -> str:
        """Hash and describe what was filled in; visible once `ready` has returned."""
        with self._closing:
            if self._files is not None:
                manifest = self._files.finish(canary, base, self._store.digests)
                self._store.sealed_with(manifest)
            else:
                parts = (self._directory, self.version, self._held, canary, base)
                manifest = write_durable(*parts, self._store.threads)
            ready()
            self._store.seal(self._directory, self.version)
        return manifest.checksum

    def discard(self) -> None:
        """It will not be sealed."""
        self._closing.close()
        self._store.forget_gone()


class DiskWeightStore(SharedMemoryWeightStore):
    """The same store on a disk, synced before a version becomes visible: for resume."""

    def __init__(self, root: str | Path, *, verify: bool = True) -> None:
        super().__init__(root, durable=True, verify=verify)


def copy_version(
    source: SharedMemoryWeightStore,
    target: SharedMemoryWeightStore,
    version: Version,
    wait: Callable[[], object] = lambda: None,
) -> str:
    """Copy a sealed version (shared memory to disk, or back on resume); returns its checksum.

    Copying again what is already there is fine; a different version of that number is an error.
    The copy is sealed when `wait` has returned.
    """
    sealed = source.map(version)  # copying hashes every byte, so damage is noticed there
    with contextlib.suppress(VersionExists):  # another process was faster
        if version not in target.versions():
            target.take_in(sealed, wait)
    if target.checksum(version) != sealed.checksum:
        raise VersionExists(
            f"version {version} in {target.root} differs from the one in {source.root}"
        )
    return sealed.checksum


def shared_memory_root(config: WeightsConfig, run_dir: str | Path) -> Path:
    """Where a run keeps its live versions: the same place again when the run is resumed."""
    if config.root:
        return Path(config.root)
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        return _remembered(Path(run_dir).resolve()) or SHARED_MEMORY / store_name(
            secrets.token_hex(8)
        )
    return Path(run_dir) / "weights"


def _remembered(run_dir: Path) -> Path | None:
    """The place that a run had before. A copy of a run directory has another; so has a run whose
    place is another user's by now."""
    try:
        said = json.loads((run_dir / ROOT_FILE).read_text())
        name, owner = str(said["name"]), str(said["run_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    root = SHARED_MEMORY / name
    known = re.fullmatch(store_name("[0-9a-f]{16}"), name) and owner == str(run_dir)
    return root if known and not problem_of(root) else None


def remember_root(run_dir: Path, root: Path) -> None:
    """Before anything is there, so that a resume finds it. Nobody else may read its name."""
    run_dir = run_dir.resolve()
    if root.parent != SHARED_MEMORY or _remembered(run_dir) == root:
        return
    said = json.dumps({"run_dir": str(run_dir), "name": root.name}) + "\n"
    fresh = run_dir / f"{ROOT_FILE}.new"
    fresh.unlink(missing_ok=True)
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(said)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(run_dir / ROOT_FILE)


def _is_locked(directory: Path) -> bool:
    with held(os.open(directory, os.O_RDONLY)) as handle:
        return not lock_now(handle)
