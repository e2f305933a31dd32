"""Bytes between workers of different hosts: an authenticated stream, no controller in between.

A server answers questions (small JSON) with an answer (small JSON) and, where the answer announces
them, raw bytes that go from one process's memory to the other's: no pickle, no copy on the way.
Both sides prove that they know the run's key (see `connection`). Every wait on the peer has a
deadline; a peer that is silent for longer counts as gone.

    asker                                   server
    connect, challenge, answer     <->      challenge, answer
    question {"kind": ...}          ->      handler(question, link)
    answer {...} | {"error": why}   <-
    bytes                           <->     as the kind says
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection as Raw
from multiprocessing.connection import Listener
from typing import Any, Self

from dora_rl.io.codec import dumps, loads
from dora_rl.io.connection import (
    SILENT_S_MAX,
    Connection,
    accept_each,
    answer_at_once,
    greet,
    wait_at_most,
)

QUESTION_BYTES_MAX = 4 << 20


class TransportError(Exception):
    """The peer is gone, silent, or says that it cannot."""


class Refused(TransportError):
    """What was asked for cannot be had. Raised by a handler before it has answered anything."""


class Link(Connection):
    """One end: questions and answers as small JSON, bulk as raw bytes."""

    def __init__(self, raw: Raw, silent_s_max: float = SILENT_S_MAX) -> None:
        super().__init__(raw)
        answer_at_once(raw, silent_s_max)
        wait_at_most(raw, silent_s_max)

    @classmethod
    def connect(cls, address: str, key: bytes) -> Self:
        """Raises `TransportError` if nobody is there or the key is another."""
        try:
            return super().connect(address, key)
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            raise TransportError(f"{address}: {error or type(error).__name__}") from error

    def say(self, body: dict[str, Any]) -> None:
        with _told():
            self.send_frame(dumps(body))

    def hear(self) -> dict[str, Any]:
        with _told():
            return loads(self.receive_frame(QUESTION_BYTES_MAX))

    def ask(self, kind: str, **body: Any) -> dict[str, Any]:
        """A question and its answer; an answer that names an error is raised."""
        self.say({"kind": kind, **body})
        answer = self.hear()
        if "error" in answer:
            raise Refused(answer["error"])
        return answer

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with _told():
            super().write(data)

    def read_into(self, view: memoryview) -> None:
        with _told():
            super().read_into(view)

    def read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.read_into(memoryview(data))
        return data


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Whatever is wrong with the connection is one kind of error."""
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        raise TransportError(str(error) or "the connection ended") from error


Handler = Callable[[dict[str, Any], Link], None]


class Server:
    """Answers questions, each connection on a thread of its own; strangers are refused.

    A handler that raises `Refused` has its reason sent as the answer; after any other
    `TransportError` nobody knows where the stream stands, and the connection ends.
    """

    def __init__(self, key: bytes, handler: Handler, host: str = "0.0.0.0") -> None:
        self._key, self._handler = key, handler
        self._listener = Listener((host, 0), family="AF_INET", backlog=64)
        self.port = int(self._listener.address[1])
        self.num_refused = 0
        self.num_bytes = 0  # answered, for the measurements
        self._closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        accept_each(self._listener, lambda: self._closing, self._serve)

    def _serve(self, raw: Raw) -> None:
        try:
            greet(raw, self._key)
            link = Link(raw)
        except (AuthenticationError, OSError, EOFError, ValueError):
            self.num_refused += 1
            raw.close()
            return
        with contextlib.suppress(TransportError), contextlib.closing(link):
            while not self._closing:
                if not self._asks(link):
                    continue  # an idle asker is no fault
                question = link.hear()
                try:
                    self._handler(question, link)
                except Refused as error:
                    link.say({"error": str(error)})

    def _asks(self, link: Link) -> bool:
        with _told():
            return link.poll(1.0)

    def close(self) -> None:
        self._closing = True
        self._listener.close()
