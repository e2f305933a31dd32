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
from dora_rl.workers.messages import Alive, Channel, End, Fetch, Fetched, Retire, Serving
from dora_rl.workers.worker import Setup, beat

BEAT_S = 1.0


def serve_relay(setup: Setup, channel: Channel) -> None:
    """Until the controller says `End` or is gone."""
    extra, at_head = setup.extra, bool(setup.extra["at_head"])
    # Receivers prove every tensor; hashing before sending would only delay them.
    store = SharedMemoryWeightStore(extra["weights_root"], verify=False)
    transfer = Path(extra["transfer_root"])
    if not at_head:
        claim(store.root)
        sweep(SHARED_MEMORY)
    relay = Relay(store, transfer, bytes.fromhex(setup.key))
    channel.send(Serving(relay.server.port, tuple(store.versions())))
    beat(lambda: channel.send(Alive()), BEAT_S)
    try:
        _serve(relay, channel)
    finally:
        relay.server.close()
        if not at_head:
            store.destroy()
            shutil.rmtree(transfer, ignore_errors=True)


def _serve(relay: Relay, channel: Channel) -> None:
    while not isinstance(message := channel.receive(), End):
        match message:
            case Fetch(version, sources):
                found = relay.fetch(version, list(sources))
                if found is not None:
                    found.add_done_callback(partial(_say_fetched, channel, version))
            case Retire(versions):
                relay.retire(versions)
            case _:
                raise AssertionError(f"a relay does not hear {message!r}")


def _say_fetched(channel: Channel, version: Version, found: Future[Found]) -> None:
    error = found.exception()
    if error is None:
        channel.send(Fetched(version, *found.result()))
    elif not isinstance(error, TransportError):
        raise error
