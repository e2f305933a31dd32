"""Requests that come to an instance from another host.

Fetching a request's KV from another host waits on a network; a thread does it, so that decoding
goes on, and the instance picks up what has arrived between two steps.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

from dora_rl.runtime.transport import Link, TransportError


class Arrivals:
    """Requests on their way here; `take` gives those that have come, or why they have not."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._done: queue.SimpleQueue[tuple[dict[str, Any], bytearray | TransportError]]
        self._done = queue.SimpleQueue()
        self.num_open = 0

    def fetch(self, body: dict[str, Any]) -> None:
        """Get the exported request that `body` names from its host's depot."""
        self.num_open += 1
        threading.Thread(target=self._fetch, args=(body,), daemon=True).start()

    def _fetch(self, body: dict[str, Any]) -> None:
        try:
            with contextlib.closing(Link.connect(body["depot"], self._key)) as link:
                answer = link.ask("request", name=body["path"])
                self._done.put((body, link.read(int(answer["num_bytes"]))))
        except TransportError as error:
            self._done.put((body, error))

    def take(self) -> Iterator[tuple[dict[str, Any], bytearray | TransportError]]:
        while not self._done.empty():
            self.num_open -= 1
            yield self._done.get()
