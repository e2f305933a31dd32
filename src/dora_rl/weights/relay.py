"""A host's relay: serves the sealed versions and exported requests of its host, pulls for it.

One per host. Instances never ask for weights themselves: the relay brings a version into the host's
shared memory once, whoever needs it there, and they map it. It pulls tensor by tensor in layer
order from the first source that answers; while a version is still arriving here, it is already
served to the next host, tensor by tensor, so that the learner's host sends it only once.

Never shows a version before every tensor has the digest it was published with. Invariant: the file
in a host's cache is byte for byte the file that the learner sealed.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from dora_rl.io.connection import SILENT_S_MAX, Link, Refused, Server, TransportError
from dora_rl.io.proof import RunKey
from dora_rl.types import Version
from dora_rl.weights.format import (
    MANIFEST_FILE,
    TENSORS_FILE,
    Manifest,
    SealedFile,
    TensorEntry,
    WeightsError,
    layer_order,
    read_manifest,
)
from dora_rl.weights.store import SharedMemoryWeightStore, VersionExists, VersionMissing

LOOK_S = 0.05  # between two looks for a version that is not there yet
RETRY_S = 0.5  # before all sources are tried again
MANIFEST_BYTES_MAX = 1 << 28

Fetched: TypeAlias = tuple[int, float]
"""Bytes that came in, and the seconds it took."""


class Arriving:
    """A version on its way into this host, readable up to where it has come."""

    def __init__(self, directory: Path, version: Version, sealed: bytes) -> None:
        (directory / MANIFEST_FILE).write_bytes(sealed)
        self.sealed = sealed
        self.manifest = read_manifest(directory, version)
        self.order = in_order(self.manifest)
        with (directory / TENSORS_FILE).open("w+b") as file:
            file.truncate(self.manifest.num_bytes)
            self._map = mmap.mmap(file.fileno(), self.manifest.num_bytes)
        self._changed = threading.Condition()
        self.num_done = -1  # of `order`; the header comes first
        self.failed = False

    def place(self, number: int) -> memoryview:
        """Where part `number` goes: -1 is the header."""
        start, whole = self.manifest.data_start, memoryview(self._map)
        if number < 0:
            return whole[:start]
        entry = self.order[number]
        return whole[start + entry.begin : start + entry.end]

    def done(self, num_done: int) -> None:
        with self._changed:
            self.num_done = num_done
            self._changed.notify_all()

    def fail(self) -> None:
        with self._changed:
            self.failed = True
            self._changed.notify_all()

    def wait(self, number: int) -> memoryview:
        """The bytes of a part, once they are here and proven."""
        with self._changed:
            here = self._changed.wait_for(
                lambda: self.failed or self.num_done > number, SILENT_S_MAX
            )
        if self.failed or not here:
            raise TransportError("the version did not arrive here")
        return self.place(number)


def in_order(manifest: Manifest) -> list[TensorEntry]:
    entries = {entry.name: entry for entry in manifest.tensors}
    return [entries[name] for name in layer_order(list(entries))]


def _sealed_part(sealed: SealedFile, order: Sequence[TensorEntry], number: int) -> memoryview:
    return sealed.header() if number < 0 else sealed.bytes_of(order[number])


class Relay:
    """The server and the puller of one host."""

    def __init__(
        self, store: SharedMemoryWeightStore, transfer_root: Path, key: RunKey, host: str
    ) -> None:
        """`host`: the address that it is asked at."""
        self.store, self.transfer_root, self._key = store, transfer_root, key
        transfer_root.mkdir(parents=True, exist_ok=True)
        self._arriving: dict[Version, Arriving] = {}
        self._sources: dict[Version, Sequence[str]] = {}  # of what is being fetched
        self._lock = threading.Lock()
        self.num_bytes_in = 0
        self.num_bytes_out = 0
        self.server = Server(key, self._answer, host)

    # -- serving ----------------------------------------------------------------------------------

    def _answer(self, question: dict[str, Any], link: Link) -> None:
        if question["kind"] == "version":
            self._send_version(question, link)
        elif question["kind"] == "request":
            self._send_request(question["name"], link)
        else:
            raise Refused(f"a relay has no {question['kind']!r}")

    def _send_version(self, question: dict[str, Any], link: Link) -> None:
        """Manifest, then every part from `skip` on: the header is the first one."""
        version, until = int(question["version"]), time.monotonic() + SILENT_S_MAX / 2
        while time.monotonic() < until:
            arriving = self._arriving.get(version)
            if arriving is not None and not arriving.failed:
                self._stream(link, arriving.sealed, arriving.order, arriving.wait, question["skip"])
                return
            with contextlib.suppress(VersionMissing):
                sealed = self.store.open(version)
                manifest = (sealed.path.parent / MANIFEST_FILE).read_bytes()
                order = in_order(sealed.manifest)
                read = partial(_sealed_part, sealed, order)
                self._stream(link, manifest, order, read, question["skip"])
                return
            time.sleep(LOOK_S)
        raise Refused(f"version {version} is not here")

    def _stream(
        self,
        link: Link,
        sealed: bytes,
        order: Sequence[TensorEntry],
        read: Callable[[int], memoryview],
        skip: int,
    ) -> None:
        link.say({"num_bytes": len(sealed)})
        link.write(sealed)
        for number in range(skip - 1, len(order)):
            data = read(number)
            self.num_bytes_out += len(data)  # before the receiver can have them
            link.write(data, tagged=False)  # its digest is in the manifest

    def _send_request(self, name: str, link: Link) -> None:
        """An exported request of an instance of this host."""
        path = self.transfer_root / Path(name).name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Refused(f"{name} is not here: {error.strerror}") from error
        link.say({"num_bytes": len(data)})
        self.num_bytes_out += len(data)
        link.write(data)

    # -- pulling ----------------------------------------------------------------------------------

    def fetch(self, version: Version, sources: Sequence[str]) -> Future[Fetched] | None:
        """Bring a version here from the first source that has it.

        While it is being fetched, asking again only names other sources; the answer is None then.
        """
        with self._lock:
            known = version in self._sources
            self._sources[version] = sources
        if known:
            return None
        found: Future[Fetched] = Future()
        threading.Thread(target=self._fetch, args=(version, found), daemon=True).start()
        return found

    def retire(self, versions: Sequence[Version]) -> None:
        for version in versions:
            with self._lock:
                self._sources.pop(version, None)
        self.store.discard(versions)

    def _fetch(self, version: Version, found: Future[Fetched]) -> None:
        began, before, why = time.monotonic(), self.num_bytes_in, "it was retired"
        while (sources := self._sources.get(version)) is not None:
            if version in self.store.versions():
                with self._lock:
                    self._sources.pop(version, None)
                found.set_result((self.num_bytes_in - before, time.monotonic() - began))
                return
            try:
                self._pull(version, sources)
            except VersionExists:
                continue
            except (TransportError, WeightsError, OSError) as error:
                why = str(error)
                time.sleep(RETRY_S)
        found.set_exception(TransportError(f"version {version}: {why}"))

    def _pull(self, version: Version, sources: Sequence[str]) -> None:
        """From one source after the other, each going on where the last one failed."""
        with self.store.receiving(version) as directory:
            try:
                self._pull_from_any(version, sources, directory)
            except (TransportError, WeightsError, OSError):
                arriving = self._arriving.get(version)
                if arriving is not None:
                    arriving.fail()  # who reads it from here looks elsewhere
                raise
            finally:
                self._arriving.pop(version, None)

    def _pull_from_any(self, version: Version, sources: Sequence[str], directory: Path) -> None:
        for source in sources[:-1]:
            try:
                self._pull_from(source, version, directory)
                return
            except TransportError:
                continue
        self._pull_from(sources[-1], version, directory)

    def _pull_from(self, source: str, version: Version, directory: Path) -> None:
        arriving = self._arriving.get(version)
        skip = arriving.num_done + 1 if arriving is not None else 0
        with contextlib.closing(Link.connect(source, self._key)) as link:
            answer = link.ask("version", version=version, skip=skip)
            sealed = bytes(link.read(int(answer["num_bytes"]), MANIFEST_BYTES_MAX))
            if arriving is None:
                arriving = Arriving(directory, version, sealed)
                self._arriving[version] = arriving
            elif arriving.sealed != sealed:
                raise TransportError(f"version {version} of {source} is another one")
            self._receive(link, arriving, skip)
        os.chmod(directory / TENSORS_FILE, 0o400)

    def _receive(self, link: Link, arriving: Arriving, skip: int) -> None:
        """Hash one part while the next one comes in."""
        with ThreadPoolExecutor(1, thread_name_prefix="relay-hash") as pool:
            checks: list[Future[None]] = []
            for number in range(skip - 1, len(arriving.order)):
                data = arriving.place(number)
                link.read_into(data, tagged=False)  # proven by its digest
                self.num_bytes_in += len(data)
                checks.append(pool.submit(_prove, arriving, number))
                if len(checks) > 1:
                    checks.pop(0).result()
            for check in checks:
                check.result()


def _prove(arriving: Arriving, number: int) -> None:
    manifest = arriving.manifest
    wanted = manifest.header_digest if number < 0 else arriving.order[number].digest
    if hashlib.sha256(arriving.place(number)).hexdigest() != wanted:
        raise TransportError(f"version {manifest.version} was damaged on its way")
    arriving.done(number + 1)
