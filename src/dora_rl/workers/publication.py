"""What a learner leaves on its way: its versions, and the optimizer's moments beside them.

Of the versions: where they are sealed, who writes them, what is made ready.

    step's end   copy into memory of the store (`Publisher`), on the device too (`Shelf`)
    beside       hash, seal (`Sealing`), write to the disk: on a GPU in a process of its own
    meanwhile    memory for the next version is made ready

Every rank has one; the first one seals and writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora_rl.setup.memory import shelf_bytes
from dora_rl.trainer import distributed
from dora_rl.trainer.checkpoints import state
from dora_rl.trainer.checkpoints.masters import host_room
from dora_rl.trainer.checkpoints.publish import Publisher
from dora_rl.trainer.learner import Learner
from dora_rl.types import Version
from dora_rl.weights.handover import DeviceMemory, Shelf
from dora_rl.weights.levels import Level, disk_level, is_one_place, make_durable, shared_level
from dora_rl.weights.sealing import Sealing, WaitingStore
from dora_rl.weights.store import DiskWeightStore, WeightsError
from dora_rl.weights.writer_process import WriterProcess
from dora_rl.workers.worker import Setup, learner_device


class Publication:
    """`lock`: held by the learner, and by whoever writes for it; None on other ranks. `executor`:
    who writes beside the training, in place of threads."""

    def __init__(self, setup: Setup, lock: int | None, executor: Executor | None) -> None:
        self._setup, root = setup, setup.extra["weights_root"]
        self.store = WaitingStore(root)
        self.sealed = Level(self.store, shared_level(root).masters)
        self.on_disk = disk_level(Path(setup.run_dir))
        one_place = is_one_place(self.sealed, self.on_disk)
        self.seals_to: Level = self.on_disk if one_place else self.sealed
        self.publisher = Publisher()
        self._writer: WriterProcess | None = None
        if executor is None and lock is not None and learner_device(setup).startswith("cuda"):
            self._writer = self._start_writer(lock)
        write = make_durable if self._writer is None or one_place else self._write
        self.sealing = Sealing(self.sealed, self.on_disk, executor, write)
        self.sealing.then = self._prepare_next
        self.store.sealing = self.sealing

    def _start_writer(self, lock: int) -> WriterProcess:
        """On a GPU versions are large, and this interpreter is busy."""
        writer = WriterProcess(keep=[lock])  # nobody comes after us before it has ended too
        for store in (self.seals_to.versions, self.seals_to.masters):
            store.digests = writer.digests
        return writer

    def _write(self, shared: Level, disk: Level, version: Version) -> None:
        assert self._writer is not None
        self._writer.make_durable(shared.versions.root, Path(self._setup.run_dir), version)

    def prepare_first(self, version: Version) -> None:
        """While the model is loaded: memory for the version that it becomes."""
        model = Path(self._setup.config.model.path)
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        self._prepare(version, size, size)

    def _prepare_next(self, version: Version) -> None:
        """When a version is sealed: memory for the next one, which is as large."""
        level = self.seals_to
        sizes = [store.map(version).num_bytes for store in (level.versions, level.masters)]
        self._prepare(version + 1, *sizes)

    def _prepare(self, version: Version, num_bytes: int, exact_bytes: int) -> None:
        trainer, level = self._setup.config.trainer, self.seals_to
        adapters = trainer.lora_rank and trainer.lora_publish == "adapters"
        if self._writer is not None and not level.versions.durable and not adapters:
            sizes = (num_bytes, 0 if trainer.lora_rank else exact_bytes)
            self.publisher.prepare(version, level.versions, level.masters, sizes)

    def share_device(self, learner: Learner) -> list[str]:
        """With instances on the same GPU, where the memory plan has room for it. Returns what there
        is to say."""
        config = self._setup.config
        wanted = config.weights.handover is True and learner.device.type == "cuda"
        whole = learner.num_ranks == 1 and not config.trainer.lora_rank
        if not wanted or not whole or not DeviceMemory.is_here():
            return []
        params = sum(p.numel() for p in learner.policy.parameters())
        try:
            size = shelf_bytes(params, learner.published_dtype.itemsize)
            shelf = Shelf(self.store.root, size)
        except WeightsError as error:
            return [f"versions reach instances through shared memory ({error})"]
        self.publisher.handover = shelf
        return []

    def close(self) -> None:
        self.publisher.close()
        if self._writer is not None:
            self._writer.close()


# -------------------------------------------------------------------------------------------------
# The optimizer's moments on disk, at most `checkpoint.state_every_s` old, written beside training.
#
# The learner is held up only by a copy to the host's memory at the end of a step; a thread writes
# it. One set is kept, the set before until the new one is complete.
#
# Never shows moments of a version that is not durable, so that those on disk are always of a
# version that a restart can stand on. Invariant: what a clean end leaves is the moments of the last
# version.


@dataclass(slots=True)
class HostCopy:
    """Moments of one version in the host's memory; empty on all ranks but the first."""

    version: Version
    tensors: dict[str, Tensor]


class Moments:
    """Copies, writes and finds them. Every rank has one; the first one writes."""

    def __init__(
        self,
        root: Path,
        every_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
        make_way: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`make_way`: returns when the disk is not needed for a version, or after so long."""
        self.store, self._make_way = DiskWeightStore(root), make_way
        self._every_s, self._clock = every_s, clock
        self._first = distributed.world()[0] == 0
        self._pool = executor or ThreadPoolExecutor(1, thread_name_prefix="moments")
        self._writing: Future[None] | None = None
        self._held: HostCopy | None = None  # the newest copy
        self._spare: list[dict[str, Tensor]] = []  # memory of copies that are no longer needed
        self._room: Future[None] | None = None  # memory for the first copy, being made
        self._saved_s = self._step_s = clock()

    def forget_after(self, sealed: Version) -> None:
        """At a start: what is newer than the newest sealed version belongs to another run."""
        self.store.discard(version for version in self.store.versions() if version > sealed)

    # -- at the end of a step ---------------------------------------------------------------------

    def step_ended(
        self, learner: Learner, version: Version, durable: Future[Any], *, saved: bool
    ) -> None:
        """The learner is at `version`; `durable` comes when the disk has that. `saved`: a
        checkpoint has the moments."""
        now = self._clock()
        took, self._step_s = now - self._step_s, now
        if self._room is None:
            self._make_room(learner)
        if saved:
            self._saved_s = now
            return
        # Later would be too late: the next chance is at the end of the next step.
        due = now + took - self._saved_s > self._every_s and not self.is_writing()
        due = distributed.decide(due)
        # Several updates per step change the moments before the step is complete; a clean end in
        # between then has this copy to save.
        if due or learner.options.updates_per_step > 1:
            self._copy(learner, version)
        if due:
            self._saved_s = now
            if self._first:
                assert self._held is not None
                self._writing = self._pool.submit(self._write, self._held, durable)

    def _make_room(self, learner: Learner) -> None:
        """Pinned memory takes as long to make as a step of training: a thread makes it, after the
        first step, when the moments are there. On several ranks the first copy makes it."""
        self._room = Future()
        self._room.set_result(None)
        if distributed.world()[1] > 1 or learner.device.type == "cpu":
            return
        tensors = list(state.moments(learner))

        def make() -> None:
            self._spare.append({name: host_room(tensor) for name, tensor in tensors})

        self._room = self._pool.submit(make)

    def _copy(self, learner: Learner, version: Version) -> None:
        if self._room is not None:
            self._room.result()
        if self._held is not None and not self.is_writing():
            self._spare.append(self._held.tensors)
        memory = self._spare.pop() if self._spare else {}
        copies: dict[str, Tensor] = {}
        for name, tensor in state.moments(learner):
            if not self._first:
                continue
            room = memory[name] if name in memory else host_room(tensor)
            copies[name] = room.copy_(tensor, non_blocking=True)
        if any(tensor.is_pinned() for tensor in copies.values()):
            torch.cuda.synchronize()
        self._held = HostCopy(version, copies)

    def _write(self, copy: HostCopy, durable: Future[Any] | None) -> None:
        if durable is not None:
            durable.result()
        if copy.version not in self.store.versions():
            turns = self._waiting_turns() if durable is not None else None
            self.store.publish(copy.version, copy.tensors.items(), make_way=turns)
        self.store.discard(older for older in self.store.versions() if older < copy.version)

    def _waiting_turns(self) -> Callable[[], None]:
        """To be called before every piece: returns when no version waits for the disk. The next
        step stands on that, and moments are many times as large. All in all they wait for a quarter
        of the age that they may reach, no longer."""
        left_s = self._every_s / 4

        def wait() -> None:
            nonlocal left_s
            if left_s > 0:
                began = self._clock()
                self._make_way(left_s)
                left_s -= self._clock() - began

        return wait

    def is_writing(self) -> bool:
        """Raises what went wrong with the last set."""
        if self._writing is not None and self._writing.done():
            self.wait()
        return self._writing is not None

    def wait(self) -> None:
        """Until nothing is being written. Raises what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    # -- at a clean end ---------------------------------------------------------------------------

    def save(self, learner: Learner, version: Version) -> None:
        """The moments of `version`, which is sealed and the learner's last, on disk when this
        returns. A step that has begun must not have changed them, or a copy must be held."""
        self.wait()
        if self._held is None or self._held.version != version:
            self._copy(learner, version)
        assert self._held is not None
        if self._first:
            self._write(self._held, None)

    # -- at a start -------------------------------------------------------------------------------

    def load(self, learner: Learner, version: Version) -> None:
        state.load_moments(learner, self.store.open(version))
