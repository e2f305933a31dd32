"""The last part of publishing, beside the next step: disk, shared memory, then the word of it.

The learner copies its weights and goes on; a thread does the rest, in this order: sealed on disk,
sealed in shared memory, told. Never two versions at a time, and nothing is told that is not
durable. What goes wrong in the thread is raised where the learner looks next: before it reads its
next message, opens a version that is not there yet or seals another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dora_rl.types import Version
from dora_rl.weights.format import SealedFile
from dora_rl.weights.store import DiskWeightStore, SharedMemoryWeightStore
from dora_rl.weights.versions import share


class Sealing:
    """At most one version on its way."""

    def __init__(self, disk: DiskWeightStore, shared: SharedMemoryWeightStore) -> None:
        self._disk, self._shared = disk, shared
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._running: Future[None] | None = None

    def begin(self, version: Version, checksum: Future[str], tell: Callable[[str], None]) -> None:
        """`checksum` comes when the disk has the version; `tell` is called, in the thread, when
        shared memory has it too."""
        assert self._running is None, "wait for the version before"
        self._running = self._pool.submit(self._seal, version, checksum, tell)

    def _seal(self, version: Version, checksum: Future[str], tell: Callable[[str], None]) -> None:
        found = checksum.result()
        share(self._disk, self._shared, version)  # the disk store has done it, if it mirrors
        tell(found)

    def is_running(self) -> bool:
        """Whether a version is on its way. Raises what went wrong with the last one."""
        if self._running is not None and self._running.done():
            self.wait()
        return self._running is not None

    def wait(self) -> None:
        """Until nothing is on its way. Raises what went wrong."""
        running, self._running = self._running, None
        if running is not None:
            running.result()


class WaitingStore(SharedMemoryWeightStore):
    """The learner's own view of shared memory: a version on its way is waited for."""

    sealing: Sealing | None = None
    waited_s = 0.0

    def open(self, version: Version) -> SealedFile:
        if self.sealing is not None and version not in self.versions():
            began = time.monotonic()
            self.sealing.wait()
            self.waited_s += time.monotonic() - began
        return super().open(version)
