"""How workers use the storage shards: instances write, rewards and the learner read.

What an instance has finished is sent by a thread of its own, again and again until a shard has it:
a shard that is restarted on the way costs time, never a sample.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from dora_rl.io.connection import Link, TransportError
from dora_rl.types import GroupId, Trajectory
from dora_rl.workers.messages import Rows, Where, unpack

RETRY_S = 0.3
READ_S_MAX = 20.0
CLOSE_S_MAX = 5.0

Waiting: TypeAlias = "queue.SimpleQueue[tuple[dict[str, Any], bytes] | None]"


def shard_of(group: GroupId, num_shards: int) -> int:
    return group % num_shards


class StorageStream:
    """Rows and journal lines of one instance on their way to the shards, in order per shard."""

    def __init__(self, key: bytes, name: str, life: int, addresses: Sequence[str]) -> None:
        self._key, self._name, self._life = key, name, life
        self._addresses = list(addresses)
        self._queues: list[Waiting] = [queue.SimpleQueue() for _ in addresses]
        self._num_put, self._num_kept = 0, [0] * len(self._queues)
        for shard, waiting in enumerate(self._queues):
            threading.Thread(target=self._send, args=(shard, waiting), daemon=True).start()

    def move_to(self, addresses: Sequence[str]) -> None:
        """Where the shards are now; their number never changes in a run."""
        assert len(addresses) == len(self._addresses)
        self._addresses = list(addresses)

    def put(self, group: GroupId, packed: bytes) -> None:
        shard = shard_of(group, len(self._queues))
        self._num_put += 1
        self._queues[shard].put(({"kind": "put"}, packed))

    def append(self, data: bytes) -> None:
        self._journal(data, whole=False)

    def replace(self, data: bytes) -> None:
        self._journal(data, whole=True)

    def _journal(self, data: bytes, *, whole: bool) -> None:
        head = {"kind": "journal", "name": self._name, "life": self._life, "whole": whole}
        self._num_put += 1
        self._queues[0].put((head, data))

    def close(self) -> None:
        """Wait a moment for what is on its way."""
        until = time.monotonic() + CLOSE_S_MAX
        while sum(self._num_kept) < self._num_put and time.monotonic() < until:
            time.sleep(0.01)
        for waiting in self._queues:
            waiting.put(None)

    def _send(self, shard: int, waiting: Waiting) -> None:
        link: Link | None = None
        while (item := waiting.get()) is not None:
            head, data = item
            while True:
                try:
                    link = link or Link.connect(self._addresses[shard], self._key)
                    link.say({**head, "num_bytes": len(data)})
                    link.write(data)
                    link.hear()
                    self._num_kept[shard] += 1
                    break
                except TransportError:
                    if link is not None:
                        link.close()
                    link = None
                    time.sleep(RETRY_S)


class StorageReader:
    """Reads rows; one connection per shard, made again when it breaks."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._links: dict[str, Link] = {}

    def rows(self, where: Where, wait_s_max: float = READ_S_MAX) -> list[Trajectory]:
        """The samples that `where` names, in its order.

        Raises `TransportError` when they cannot be had for so long.
        """
        address, until = where.address, time.monotonic() + wait_s_max
        while True:
            try:
                link = self._links.get(address) or Link.connect(address, self._key)
                self._links[address] = link
                answer = link.ask("rows", group=where.group, samples=list(where.samples))
                found = unpack(bytes(link.read(int(answer["num_bytes"]))))
                assert isinstance(found, Rows)
                return list(found.samples)
            except TransportError:
                with contextlib.suppress(KeyError):
                    self._links.pop(address).close()
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_S)
