"""Versions on their way into an instance's engine, and what it does before the first is there.

Loads take turns with decoding: `go_on` does a layer, or looks at the thread that loads. Never
decides what is loaded. Invariant: every load that was asked for is told once, as done or as failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from dora_rl.core import events as ev
from dora_rl.out_of_memory import free_cached, shortage
from dora_rl.types import BaseDiffers, UserError, Version
from dora_rl.weights.format import check_committed
from dora_rl.weights.handover import DeviceMemory, HandedOver, Handovers
from dora_rl.weights.store import SealedFile, SharedMemoryWeightStore, WeightsError
from dora_rl.workers.engines import InstanceEngine
from dora_rl.workers.worker import Setup


class Loads:
    """Of one instance. `say` tells the core."""

    def __init__(
        self,
        setup: Setup,
        engine: InstanceEngine,
        say: Callable[[ev.Loaded | ev.LoadFailed], None],
    ) -> None:
        config, root = setup.config, setup.extra["weights_root"]
        self._name, self._engine, self._say = setup.name, engine, say
        self._store = SharedMemoryWeightStore(root, verify=config.weights.verify)
        self._verify = config.rollout.verify_weights
        shares = config.weights.handover is True and setup.extra.get("device", "cpu") != "cpu"
        memory = DeviceMemory() if shares and DeviceMemory.is_here() else None
        self._handovers = Handovers(Path(root), memory)
        self._on_device: set[Version] = set()  # that are being loaded from there
        self._not_there: set[Version] = set()  # that could not be
        self._attempts: dict[Version, int] = {}
        self._committed: dict[Version, str] = {}  # what the log says they are
        self.awaited: list[Version] = []  # to be loaded, and not in the store yet
        self.running: deque[tuple[Version, Iterator[str]]] = deque()
        self._short: set[Version] = set()  # for which there was not enough memory, once
        self._checksums: dict[Version, str] = {}  # of what is being loaded

    def ask(self, version: Version, attempt: int, committed: str = "") -> None:
        self._attempts[version], self._committed[version] = attempt, committed
        if version not in [*self.awaited, *(version for version, _ in self.running)]:
            self.awaited.append(version)  # else it is asked again because it took long

    def go_on(self) -> None:
        """An instance may be up before the learner has sealed (or copied back) a version."""
        if self.awaited:
            there = self._store.versions()
            for version in [version for version in self.awaited if version in there]:
                self.awaited.remove(version)
                self._begin(version)
        if self.running:
            self._load_some()

    def _begin(self, version: Version) -> None:
        try:
            if self._verify:  # the engine hashes the tensors it reads; once is enough
                sealed = self._store.map(version)
                sealed.check_header()
            else:
                sealed = self._store.open(version)
            check_committed(sealed, self._committed.get(version, ""))
            self._checksums[version] = sealed.checksum
            source = self._find_on_device(sealed) or sealed
            self.running.append((version, self._engine.load_layers(version, source, self._verify)))
        except BaseDiffers:
            raise  # no load will ever succeed here
        except (WeightsError, UserError) as error:
            self._say_failed(version, error)

    def _find_on_device(self, sealed: SealedFile) -> HandedOver | None:
        """The version in the memory of the device, unless it was tried there before."""
        if sealed.version in self._not_there:
            return None
        try:
            found = self._handovers.find(sealed)
        except WeightsError as error:
            self._handovers = Handovers(self._store.root, None)
            self._engine.notes.append(f"versions are loaded from shared memory ({error})")
            return None
        if found is not None:
            self._on_device.add(sealed.version)
        return found

    def _load_some(self) -> None:
        version, layers = self.running[0]
        try:
            next(layers)
            return
        except StopIteration:
            attempt, checksum = self._attempts.get(version, -1), self._checksums.pop(version)
            self._say(ev.Loaded(self._name, version, attempt=attempt, checksum=checksum))
        except BaseDiffers:
            raise
        except (WeightsError, UserError) as error:
            if version in self._on_device:
                self._engine.notes.append(f"{error}; it is loaded from shared memory")
                self._not_there.add(version)
                self.awaited.append(version)
            else:
                self._say_failed(version, error)
        except RuntimeError as error:
            self._load_again(version, error)
        self.running.popleft()
        self._on_device.discard(version)

    def _load_again(self, version: Version, error: RuntimeError) -> None:
        """Where memory ran out, once more without what torch holds on to; then the core decides."""
        missing = shortage(error)
        if not missing:
            raise error
        self._checksums.pop(version)
        if version in self._short:
            self._say_failed(version, error)
            return
        self._short.add(version)
        line = f"out of memory while version {version} was loaded ({missing}); it is loaded again"
        self._engine.notes.append(line)
        free_cached()
        self.awaited.append(version)

    def _say_failed(self, version: Version, error: Exception) -> None:
        why, attempt = str(error), self._attempts.get(version, -1)
        self._say(ev.LoadFailed(self._name, version, why, attempt=attempt))


class Warming:
    """Has an engine compile and capture, a part at a time, until a version is resident: from then
    on nobody waits for what may never be needed."""

    def __init__(self, engine: InstanceEngine, plain: bool) -> None:
        self._engine = engine
        self._parts: Iterator[None] | None = engine.warm_up(plain)

    def part(self) -> bool:
        """Do one; False if there was none to do."""
        if self._parts is not None and not self._engine.versions():
            for _ in self._parts:
                return True
        self._parts = None
        return False
