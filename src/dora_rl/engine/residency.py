"""Which policy versions an engine holds, and how they come and go.

A version is loaded layer by layer, between steps, into a free slot (on a GPU by a thread, beside
the steps); it becomes resident only after its checksum and canary agreed. Invariant: a version
number names one set of weights for as long as it is resident, and a slot is never reused while a
request of its version is in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.engine.backend import Runner
from dora_rl.model.directory import HfDirectory, TensorSource
from dora_rl.model.sealed import CheckedSource, check_base, check_canary
from dora_rl.out_of_memory import maybe_fail
from dora_rl.types import UserError, Version

if TYPE_CHECKING:
    from dora_rl.ports import SealedWeights


ASIDE_S = 0.0002  # how long a look at a load in another thread may take
HASH_THREADS = 4  # beside it


class Residency:
    """Version -> weight slot."""

    def __init__(self, runner: Runner, versions_max: int) -> None:
        self._runner = runner
        self._versions_max = versions_max
        self.slots: dict[Version, int] = {}
        self._has_base = runner.weights.adapters is None
        self._base = self._base_name = ""  # its checksum, and what to call it
        self._loading: dict[Version, int] = {}

    def versions(self) -> tuple[Version, ...]:
        return tuple(sorted(self.slots))

    def load_base(self, source: TensorSource | str | Path, verify: bool = True) -> None:
        """The weights under every adapter; `verify`: adapters for other weights are refused."""
        assert self._runner.weights.adapters is not None, "only LoRA versions have a base"
        assert not self.slots, "the base is loaded before its adapters"
        where = str(source) if isinstance(source, str | Path) else "the base"
        reader = HfDirectory(source) if isinstance(source, str | Path) else source
        checked = CheckedSource(reader)
        for _ in self._runner.weights.load(0, checked if verify else reader, where):
            pass
        self._has_base, self._base_name = True, where
        self._base = checked.checksum() if verify else ""

    def load(
        self, version: Version, source: SealedWeights | TensorSource | str | Path, verify: bool
    ) -> Iterator[str]:
        """Fill a free slot, yielding after each layer; resident once the iterator is exhausted."""
        slot = self._reserve(version)
        try:
            maybe_fail("load")
            if isinstance(source, str | Path):
                yield from self._layers(slot, HfDirectory(source), str(source))
            else:
                yield from self._load_checked(slot, version, source, verify)
            self.slots[version] = slot
        finally:
            del self._loading[version]

    def retire(self, version: Version) -> None:
        if version not in self.slots:
            raise UserError(f"version {version} is not resident, so it cannot be retired")
        del self.slots[version]

    def _load_checked(
        self, slot: int, version: Version, source: SealedWeights | TensorSource, verify: bool
    ) -> Iterator[str]:
        where = f"version {version}"
        sealed_version = getattr(source, "version", version)
        if sealed_version != version:
            raise UserError(f"{where}: the sealed weights say they are version {sealed_version}")
        check_base(source, self._base, self._base_name)
        if not verify or not hasattr(source, "checksum"):
            yield from self._layers(slot, source, where)
            return
        checked = CheckedSource(source, HASH_THREADS if self._runner.loads_aside else 0)
        try:
            yield from self._layers(slot, checked, where, then=checked.checksum)
            checked.check(source)  # pyright: ignore[reportArgumentType]
        finally:
            checked.close()
        canary = getattr(source, "canary", None)
        if canary is not None:
            logprobs = self._runner.score(slot, canary.token_ids)
            check_canary(canary, logprobs, version, self._runner.weights.dtype)

    def _layers(
        self, slot: int, source: TensorSource, where: str, then: Callable[[], object] = lambda: None
    ) -> Iterator[str]:
        """`then` is called behind the last layer, aside too: it may take its time."""

        def load() -> Iterator[str]:
            yield from self._runner.load(slot, source, where)
            then()

        return aside(load) if self._runner.loads_aside else load()

    def _reserve(self, version: Version) -> int:
        if not self._has_base:
            raise UserError(f"version {version} is an adapter, and its base is not loaded yet")
        if version in self.slots or version in self._loading:
            raise UserError(f"version {version} is already resident or being loaded")
        taken = {*self.slots.values(), *self._loading.values()}
        free = [slot for slot in range(self._versions_max) if slot not in taken]
        if not free:
            raise UserError(
                f"version {version}: all {self._versions_max} weight slots hold "
                f"{sorted({*self.slots, *self._loading})}; retire one or raise rollout.versions_max"
            )
        self._loading[version] = free[0]
        return free[0]


def aside(load: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Load in a thread; yields nothing of interest for as long as that takes."""
    with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
        loading = pool.submit(lambda: list(load()))
        while not wait([loading], ASIDE_S).done:
            yield ""
        loading.result()
