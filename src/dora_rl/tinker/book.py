"""Promises and their answers: what a client was told would come, kept until it has come for it.

A request is known by its scope (a training client, a sampling session) and its number there. The
same request sent again gets the same promise, so that a retry does nothing twice; another request
under a number that is taken is refused. Pure: no clock, no I/O. Invariants: an answer is never
dropped before it was fetched, and of fetched ones no more than `kept_max`, with `bytes_max` bytes,
are kept.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from dora_rl.types import UserError

Key: TypeAlias = tuple[str, int]


class Answer(NamedTuple):
    """The body of a response: JSON, or protobuf."""

    body: bytes
    is_proto: bool = False


@dataclass(slots=True, eq=False)
class Promise:
    id: str
    owner: str
    key: Key
    digest: bytes
    answer: Answer | None = None
    is_fetched: bool = False


class Book:
    """`prefix` tells the promises of this start of the server from those of others."""

    def __init__(self, prefix: str, kept_max: int = 4096, bytes_max: int = 256 << 20) -> None:
        self._prefix, self._kept_max, self._bytes_max = prefix, kept_max, bytes_max
        self._by_id: dict[str, Promise] = {}
        self._by_key: dict[Key, Promise] = {}
        self._fetched: dict[str, int] = {}  # bytes, oldest first
        self._num_open: dict[str, int] = {}
        self._num_kept: dict[str, int] = {}  # bytes of answers that an owner has not fetched
        self._count = self._num_bytes = 0

    def known(self, key: Key, body: bytes) -> Promise | None:
        """The promise of that request, where it was given before."""
        promise = self._by_key.get(key)
        if promise is not None and promise.digest != digest_of(body):
            raise UserError(f"request {key[1]} of {key[0]} was another one; each needs its number")
        return promise

    def promise(self, owner: str, key: Key, body: bytes) -> Promise:
        self._count += 1
        made = Promise(f"{self._prefix}-{self._count}", owner, key, digest_of(body))
        self._by_id[made.id] = self._by_key[key] = made
        self._num_open[key[0]] = self.num_open(key[0]) + 1
        return made

    def num_open(self, scope: str) -> int:
        """Promises of it that are not answered, or whose answer was not fetched."""
        return self._num_open.get(scope, 0)

    def num_kept(self, owner: str) -> int:
        """Bytes of answers that it has not fetched."""
        return self._num_kept.get(owner, 0)

    def answered(self, promise: Promise, answer: Answer) -> None:
        if promise.id in self._by_id and promise.answer is None:
            self._keep(promise, len(answer.body))
        promise.answer = answer

    def find(self, request_id: str, owner: str) -> Promise | None:
        promise = self._by_id.get(request_id)
        return promise if promise is not None and promise.owner == owner else None

    def is_of_another_start(self, request_id: str) -> bool:
        return not request_id.startswith(f"{self._prefix}-")

    def fetched(self, promise: Promise) -> None:
        assert promise.answer is not None
        if promise.is_fetched or promise.id not in self._by_id:
            return
        promise.is_fetched = True
        self._close(promise)
        self._fetched[promise.id] = size = len(promise.answer.body)
        self._num_bytes += size
        while len(self._fetched) > self._kept_max or self._num_bytes > self._bytes_max:
            self._drop(self._by_id[next(iter(self._fetched))])

    def forget(self, scope: str) -> None:
        """Nobody will come for its answers any more."""
        for promise in [p for p in self._by_id.values() if p.key[0] == scope]:
            self._drop(promise)

    def _drop(self, promise: Promise) -> None:
        del self._by_id[promise.id], self._by_key[promise.key]
        self._num_bytes -= self._fetched.pop(promise.id, 0)
        if not promise.is_fetched:
            self._close(promise)

    def _keep(self, promise: Promise, num_bytes: int) -> None:
        kept = self.num_kept(promise.owner) + num_bytes
        self._num_kept[promise.owner] = kept
        if not kept:
            del self._num_kept[promise.owner]

    def _close(self, promise: Promise) -> None:
        """Its answer was fetched, or nobody will come for it."""
        if promise.answer is not None:
            self._keep(promise, -len(promise.answer.body))
        scope = promise.key[0]
        self._num_open[scope] -= 1
        if not self._num_open[scope]:
            del self._num_open[scope]


def digest_of(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
