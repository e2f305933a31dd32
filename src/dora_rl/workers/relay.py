"""The relay of a host as a worker: told by the controller what to fetch and what to let go.

On the controller's host it only serves: the store there belongs to the learner. Elsewhere the store
is a cache, and ends with the relay.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from dora_rl.io.connection import TransportError
from dora_rl.types import Version
from dora_rl.weights.leftovers import claim, sweep
from dora_rl.weights.relay import Fetched as Found
from dora_rl.weights.relay import Relay
from dora_rl.weights.store import SHARED_MEMORY, SharedMemoryWeightStore
from dora_rl.workers.messages import Alive, Fetch, Fetched, Message, Retire, Send, Serving
from dora_rl.workers.worker import Role, Setup, heartbeat

HEARTBEAT_S = 1.0


class RelayWorker(Role):
    def __init__(self, setup: Setup, send: Send) -> None:
        super().__init__(setup, send)
        self._at_head = bool(setup.extra["at_head"])
        # Receivers prove every tensor; hashing before sending would only delay them.
        self._store = SharedMemoryWeightStore(setup.extra["weights_root"], verify=False)
        self._transfer = Path(setup.extra["transfer_root"])
        if not self._at_head:
            claim(self._store.root)
            sweep(SHARED_MEMORY)
        self._relay = Relay(self._store, self._transfer, setup.run_key, setup.listens_at)

    def join(self) -> None:
        self.send(Serving(self._relay.server.port, tuple(self._store.versions())))
        heartbeat(lambda: self.send(Alive()), HEARTBEAT_S)

    def hear(self, message: Message) -> None:
        match message:
            case Fetch(version, sources):
                found = self._relay.fetch(version, list(sources))
                if found is not None:
                    found.add_done_callback(partial(self._say_fetched, version))
            case Retire(versions):
                self._relay.retire(versions)
            case _:
                raise AssertionError(f"a relay does not hear {message!r}")

    def _say_fetched(self, version: Version, found: Future[Found]) -> None:
        error = found.exception()
        if error is None:
            self.send(Fetched(version, *found.result()))
        elif not isinstance(error, TransportError):
            raise error

    def drop(self) -> None:
        self._relay.server.close()
        if not self._at_head:
            self._store.destroy()
            shutil.rmtree(self._transfer, ignore_errors=True)
