"""Requests that leave an instance for another one, and those that come.

    source --Exported--> controller --Import--> destination --Imported--> controller --MoveEnded-->

KV goes through a file in shared memory from instance to instance, never through the controller.
That of another host is read through its relay, which waits on a network: a thread does it, so that
decoding goes on, and the instance picks up what has arrived between two steps. Invariant: the
source keeps the request until the destination has said that it has it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import continuation, request_from_json, request_json
from dora_rl.engine.transfer import Export, begin_import, chunk_bytes, chunk_from_bytes
from dora_rl.io.connection import Link, TransportError
from dora_rl.io.proof import RunKey
from dora_rl.types import RequestId, UserError
from dora_rl.workers.engines import InstanceEngine
from dora_rl.workers.messages import Exported, Imported, Send

if TYPE_CHECKING:
    from dora_rl.engine.vllm.engine import VllmExport

Data: TypeAlias = bytes | bytearray | TransportError


class Moves:
    """Of one instance. `epochs` are the requests it has, shared with its loop."""

    def __init__(
        self,
        name: str,
        engine: InstanceEngine,
        epochs: dict[RequestId, int],
        folder: Path,
        key: RunKey,
        send: Send,
        say: Callable[[ev.MoveFailed], None],
    ) -> None:
        self._name, self._engine, self._epochs = name, engine, epochs
        self._folder, self._send, self._say = folder, send, say
        self.leaving: dict[RequestId, Export | VllmExport] = {}
        self.arrivals = Arrivals(key)

    def begin(self, action: act.Move) -> None:
        """Write the request to shared memory and say where; it stays here until it has arrived."""
        rid = action.request
        self._engine.drain()
        seq = self._engine.find(rid)
        if self._epochs.get(rid) != action.epoch or seq is None:
            return
        export = self.leaving[rid] = self._engine.export(rid)
        path = self._path_of(rid, action.epoch)
        said = Exported(rid, action.epoch, action.attempt, action.dst, seq.num_tokens, str(path))
        if action.how is not act.How.KV or not export.has_kv:
            self._send(replace(said, saved=request_json(continuation(seq))))
            return
        try:
            write_export(export, path)
        except OSError as error:  # shared memory is full: the request stays
            path.unlink(missing_ok=True)
            self.end(rid, done=False)
            who = (rid, action.epoch, self._name, action.dst)
            self._say(ev.MoveFailed(*who, True, str(error), attempt=action.attempt))
            return
        self._send(replace(said, num_bytes=export.num_bytes))

    def end(self, rid: RequestId, *, done: bool) -> None:
        export = self.leaving.pop(rid, None)
        if export is None:
            return
        self._path_of(rid, self._epochs.get(rid, 0)).unlink(missing_ok=True)
        if done:
            export.done()
            self._epochs.pop(rid, None)
        else:
            export.cancel()

    def give_up(self, rid: RequestId, epoch: int) -> None:
        """The controller aborted a request that may be here, leave or be on its way."""
        self.arrivals.give_up(rid, epoch)
        if self._epochs.get(rid) == epoch and self.leaving.pop(rid, None) is not None:
            self._path_of(rid, epoch).unlink(missing_ok=True)

    def _path_of(self, rid: RequestId, epoch: int) -> Path:
        """Named after this instance: the next one may export the same request at any moment."""
        return self._folder / f"{rid.group}.{rid.sample}.{epoch}.{self._name}.kv"

    def take(self, export: Exported) -> None:
        """Take a request over: with nothing but its tokens, from this host, or from another."""
        if export.saved is not None:
            self._arrived(export, b"")
        elif export.relay:
            self.arrivals.fetch(export)
        else:
            path = Path(export.path)
            try:
                self._arrived(export, path.read_bytes())
            except OSError as error:
                self._send(Imported(export, str(error)))
            path.unlink(missing_ok=True)

    def take_arrived(self) -> None:
        for export, data in self.arrivals.take():
            self._arrived(export, data)

    def _arrived(self, export: Exported, data: Data) -> None:
        try:
            if isinstance(data, TransportError):
                raise data
            if export.saved is not None:
                self._engine.submit(request_from_json(export.saved))
            else:
                self._take_blocks(memoryview(data))
        except (UserError, TransportError) as error:
            self._send(Imported(export, str(error)))
            return
        self._epochs[export.request] = export.epoch
        self._send(Imported(export))

    def _take_blocks(self, data: memoryview) -> None:
        length = int.from_bytes(data[:4], "little")
        if not isinstance(self._engine, Engine):
            self._engine.take_in(bytes(data[4 : 4 + length]), data[4 + length :])
            return
        arrival = begin_import(self._engine, bytes(data[4 : 4 + length]))
        size = self._engine.runner.cache.block_bytes
        for at in range(4 + length, len(data), size):
            arrival.write(chunk_from_bytes(self._engine, data[at : at + size]))
        arrival.commit()


def write_export(export: Export | VllmExport, path: Path) -> None:
    """Metadata and KV blocks, one after the other."""
    with path.open("wb") as file:
        file.write(len(export.meta).to_bytes(4, "little") + export.meta)
        for chunk in export.chunks():
            file.write(chunk_bytes(chunk))


class Arrivals:
    """Requests on their way here from other hosts; `take` gives those that have come, or why they
    have not. One that the controller gives up meanwhile is never given: nobody would know of it."""

    def __init__(self, key: RunKey) -> None:
        self._key = key
        self._done: queue.SimpleQueue[tuple[Exported, Data]] = queue.SimpleQueue()
        self.open: list[Exported] = []

    def fetch(self, export: Exported) -> None:
        """Get the exported request from the relay of its host."""
        self.open.append(export)
        threading.Thread(target=self._fetch, args=(export,), daemon=True).start()

    def give_up(self, request: RequestId, epoch: int) -> None:
        """The controller aborted a request that may be on its way."""
        self.open = [e for e in self.open if (e.request, e.epoch) != (request, epoch)]

    def _fetch(self, export: Exported) -> None:
        try:
            with contextlib.closing(Link.connect(export.relay, self._key)) as link:
                answer = link.ask("request", name=export.path)
                self._done.put((export, link.read(int(answer["num_bytes"]), export.num_bytes)))
        except TransportError as error:
            self._done.put((export, error))

    def take(self) -> Iterator[tuple[Exported, Data]]:
        while not self._done.empty():
            export, data = self._done.get()
            if any(export is wanted for wanted in self.open):
                self.open = [other for other in self.open if other is not export]
                yield export, data
