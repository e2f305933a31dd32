"""The relay of a host as a worker: told by the controller what to fetch and what to let go.

On the controller's host it only serves: the store there belongs to the learner. Elsewhere the store
is a cache, and ends with the relay.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from dora_rl.io.transport import TransportError
from dora_rl.io.wire import Channel
from dora_rl.types import Version
from dora_rl.weights.relay import Relay, Fetched
from dora_rl.weights.leftovers import claim, sweep
from dora_rl.weights.store import SHARED_MEMORY, SharedMemoryWeightStore
from dora_rl.workers.worker import Setup, beat

BEAT_S = 1.0


def serve_relay(setup: Setup, channel: Channel) -> None:
    """Until the controller says "end" or is gone."""
    extra, at_head = setup.extra, bool(setup.extra["at_head"])
    # Receivers prove every tensor; hashing before sending would only delay them.
    store = SharedMemoryWeightStore(extra["weights_root"], verify=False)
    transfer = Path(extra["transfer_root"])
    if not at_head:
        claim(store.root)
        sweep(SHARED_MEMORY)
    relay = Relay(store, transfer, bytes.fromhex(setup.key))
    body = {"port": relay.server.port, "versions": list(store.versions())}
    channel.send("ready", body)
    beat(channel, lambda: channel.send("beat", {"cpu_s": time.process_time()}), BEAT_S)
    try:
        _serve(relay, channel)
    finally:
        relay.server.close()
        if not at_head:
            store.destroy()
            shutil.rmtree(transfer, ignore_errors=True)


def _serve(relay: Relay, channel: Channel) -> None:
    while True:
        message = channel.receive()
        if message.kind == "end":
            return
        if message.kind == "fetch":
            version = int(message.body["version"])
            found = relay.fetch(version, message.body["sources"])
            if found is not None:
                found.add_done_callback(partial(_say_fetched, channel, version))
        elif message.kind == "retire":
            relay.retire(message.body["versions"])


def _say_fetched(channel: Channel, version: Version, found: Future[Fetched]) -> None:
    error = found.exception()
    if error is None:
        num_bytes, seconds = found.result()
        body = {"version": version, "num_bytes": num_bytes, "seconds": seconds}
        channel.send("fetched", body)
    elif not isinstance(error, TransportError):
        raise error
