"""Publishing beside the next step: sealed, told, durable, told again.

The learner copies its weights and goes on; threads do the rest, in this order:

    hash and describe masters and version, which lie in shared memory
    wait until the version before is durable
    give them their names                          sealed: `tell`, and instances load it
    make ready what the next version needs         `then`
    write the same to the disk                     durable: `tell_durable`

So at most one version is sealed and not durable: a disk that is slower than the steps holds up the
next seal, not the copy of the weights, and how long it did is counted. Never tells what is not
there yet. What goes wrong in a thread is raised where the learner looks next: before it reads its
next message, opens a version that is not there yet or seals another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

from dora_rl.types import Version
from dora_rl.weights.format import SealedFile
from dora_rl.weights.levels import Level, make_durable
from dora_rl.weights.store import SharedMemoryWeightStore


class Sealing:
    """At most one version on its way to the disk, and one that waits for it to be sealed."""

    def __init__(
        self,
        shared: Level,
        disk: Level,
        executor: Executor | None = None,
        write: Callable[[Level, Level, Version], None] = make_durable,
    ) -> None:
        """`executor`: who does it, in place of threads; `write`: how it comes to the disk."""
        self._shared, self._disk, self._write = shared, disk, write
        self._pool = executor or ThreadPoolExecutor(1, thread_name_prefix="durable")
        self._durable: Future[None] | None = None  # of the newest version
        self._sealed: Future[str] | None = None
        self.then: Callable[[Version], None] = lambda version: None  # what follows a seal
        self.waited_s = 0.0  # for the disk, before the version that was sealed last

    def turn(self) -> Callable[[], None]:
        """What has to be called before the next version is sealed: waits until the one before is
        durable. Raises what went wrong with it."""
        before = self._durable

        def wait_for_it() -> None:
            began = time.monotonic()
            if before is not None:
                before.result()
            self.waited_s = time.monotonic() - began

        return wait_for_it

    def begin(
        self,
        version: Version,
        sealed: Future[str],
        tell: Callable[[str], None],
        tell_durable: Callable[[], None] = lambda: None,
    ) -> Future[None]:
        """`sealed` gives the checksum when shared memory has the version. The result comes when the
        disk has it. Both are told in the thread."""
        before, self._sealed = self._durable, sealed
        self._durable = self._pool.submit(self._follow, before, version, sealed, tell, tell_durable)
        return self._durable

    def _follow(
        self,
        before: Future[None] | None,
        version: Version,
        sealed: Future[str],
        tell: Callable[[str], None],
        tell_durable: Callable[[], None],
    ) -> None:
        if before is not None:
            before.result()  # done: one thread; what went wrong with it is not passed over
        tell(sealed.result())
        self._shared.forget_masters_before(version)  # to give memory back takes a while
        self.then(version)
        self._write(self._shared, self._disk, version)
        tell_durable()

    def make_way(self, timeout_s: float) -> None:
        """For others who write to the disk, in any thread: returns when no version is on its way,
        or after so long."""
        durable = self._durable
        if durable is not None:
            wait([durable], timeout_s)

    def is_running(self) -> bool:
        """Whether a version is on its way. Raises what went wrong with the last one."""
        if self._durable is not None and self._durable.done():
            self.wait()
        return self._durable is not None

    def wait_sealed(self) -> None:
        """Until shared memory has the newest version. Raises what went wrong."""
        if self._sealed is not None:
            self._sealed.result()

    def wait(self) -> None:
        """Until nothing is on its way. Raises what went wrong."""
        durable, self._durable, self._sealed = self._durable, None, None
        if durable is not None:
            durable.result()


class WaitingStore(SharedMemoryWeightStore):
    """The learner's own view of shared memory: a version on its way is waited for, and tensors are
    read from where its GPU knows them."""

    sealing: Sealing | None = None
    waited_s = 0.0

    def open(self, version: Version) -> SealedFile:
        if self.sealing is not None and version not in self.versions():
            began = time.monotonic()
            self.sealing.wait_sealed()
            self.waited_s += time.monotonic() - began
        return super().open(version)

    def map(self, version: Version) -> SealedFile:
        sealed = super().map(version)
        sealed.pinned = self.pinned(sealed)
        return sealed
