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

from dora_rl.io.transport import Link, TransportError
from dora_rl.types import RequestId


class Arrivals:
    """Requests on their way here; `take` gives those that have come, or why they have not.

    One that the controller gives up meanwhile is never given: nobody would know that it is here.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._done: queue.SimpleQueue[tuple[dict[str, Any], bytearray | TransportError]]
        self._done = queue.SimpleQueue()
        self._open: list[dict[str, Any]] = []

    def fetch(self, body: dict[str, Any]) -> None:
        """Get the exported request that `body` names from its host's relay."""
        self._open.append(body)
        threading.Thread(target=self._fetch, args=(body,), daemon=True).start()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def give_up(self, request: RequestId, epoch: int) -> None:
        """The controller aborted a request that may be on its way."""
        key = (request.group, request.sample, epoch)
        self._open = [body for body in self._open if _key(body) != key]

    def _fetch(self, body: dict[str, Any]) -> None:
        try:
            with contextlib.closing(Link.connect(body["relay"], self._key)) as link:
                answer = link.ask("request", name=body["path"])
                self._done.put((body, link.read(int(answer["num_bytes"]))))
        except TransportError as error:
            self._done.put((body, error))

    def take(self) -> Iterator[tuple[dict[str, Any], bytearray | TransportError]]:
        while not self._done.empty():
            body, data = self._done.get()
            if any(body is wanted for wanted in self._open):
                self._open = [other for other in self._open if other is not body]
                yield body, data


def _key(body: dict[str, Any]) -> tuple[int, int, int]:
    return body["group"], body["sample"], body["epoch"]
