"""The way of the learner's versions: where they are sealed, who writes them, what is made ready.

    step's end   copy into memory of the store (`Publisher`), on the device too (`Shelf`)
    beside       hash, seal (`Sealing`), write to the disk: on a GPU in a process of its own
    meanwhile    memory for the next version is made ready

Every rank has one; the first one seals and writes.
"""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

from dora_rl.trainer.checkpoints.publish import Publisher
from dora_rl.trainer.learner import Learner
from dora_rl.types import Version
from dora_rl.weights.handover import DeviceMemory, Shelf
from dora_rl.weights.levels import Level, disk_level, is_one_place, make_durable, shared_level
from dora_rl.weights.sealing import Sealing, WaitingStore
from dora_rl.weights.store import WeightsError
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
        del disk
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
            shelf = Shelf(self.store.root, params * learner.published_dtype.itemsize)
        except WeightsError as error:
            return [f"versions reach instances through shared memory ({error})"]
        self.publisher.handover = shelf
        return []

    def close(self) -> None:
        self.publisher.close()
        if self._writer is not None:
            self._writer.close()
