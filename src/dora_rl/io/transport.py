"""Bytes between workers of different hosts: an authenticated stream, no controller in between.

A server answers questions (small JSON) with an answer (small JSON) and, where the answer announces
them, raw bytes that go from one process's memory to the other's: no pickle, no copy on the way.
Both sides prove by HMAC that they know the run's key before anything else is read. Every wait on
the peer has a deadline; a peer that is silent for longer counts as gone.

    asker                                   server
    connect, challenge, answer     <->      challenge, answer
    question {"kind": ...}          ->      handler(question, link)
    answer {...} | {"error": why}   <-
    bytes                           <->     as the kind says
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from dora_rl.io.wire import answer_at_once, host_and_port

CONNECT_S_MAX = 5.0
SILENT_S_MAX = 30.0
QUESTION_BYTES_MAX = 4 << 20
SEND_BYTES = 4 << 20  # of one system call


class TransportError(Exception):
    """The peer is gone, silent, or says that it cannot."""


class Refused(TransportError):
    """What was asked for cannot be had. Raised by a handler before it has answered anything."""


class Link:
    """One end of a connection: JSON by message, bulk as raw bytes."""

    def __init__(self, connection: Connection, silent_s_max: float = SILENT_S_MAX) -> None:
        answer_at_once(connection, silent_s_max)
        self._connection = connection
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        wait = struct.pack("ll", int(silent_s_max), int(silent_s_max % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, wait)

    @classmethod
    def connect(cls, address: str, key: bytes, silent_s_max: float = SILENT_S_MAX) -> Link:
        """Raises `TransportError` if nobody is there or the key is another."""
        try:
            plain = socket.create_connection(host_and_port(address), CONNECT_S_MAX)
            plain.settimeout(None)
            connection = Connection(plain.detach())
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            return cls(connection, silent_s_max)
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            raise TransportError(f"{address}: {error or type(error).__name__}") from error

    def say(self, body: dict[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(body).encode())
        except OSError as error:
            raise TransportError(str(error)) from error

    def hear(self) -> dict[str, Any]:
        try:
            return json.loads(self._connection.recv_bytes(QUESTION_BYTES_MAX))
        except (OSError, EOFError, ValueError) as error:
            raise TransportError(str(error) or "the connection ended") from error

    def ask(self, kind: str, **body: Any) -> dict[str, Any]:
        """A question and its answer; an answer that names an error is raised."""
        self.say({"kind": kind, **body})
        answer = self.hear()
        if "error" in answer:
            raise Refused(answer["error"])
        return answer

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        try:
            for at in range(0, len(view), SEND_BYTES):
                self._socket.sendall(view[at : at + SEND_BYTES])
        except OSError as error:
            raise TransportError(str(error)) from error

    def read_into(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            try:
                count = self._socket.recv_into(view[at:])
            except OSError as error:
                raise TransportError(str(error)) from error
            if not count:
                raise TransportError("the connection ended in the middle")
            at += count

    def read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.read_into(memoryview(data))
        return data

    def close(self) -> None:
        self._socket.close()
        self._connection.close()


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
        while not self._closing:
            try:
                connection = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
        except (AuthenticationError, OSError, EOFError, ValueError):
            self.num_refused += 1
            connection.close()
            return
        link = Link(connection)
        with contextlib.suppress(TransportError), contextlib.closing(link):
            while not self._closing:
                question = self._next(connection)
                try:
                    self._handler(question, link)
                except Refused as error:
                    link.say({"error": str(error)})

    def _next(self, connection: Connection) -> dict[str, Any]:
        """The next question, whenever it comes: an idle asker is no fault."""
        while True:
            try:
                if connection.poll(1.0):
                    return json.loads(connection.recv_bytes(QUESTION_BYTES_MAX))
            except (OSError, EOFError, ValueError) as error:
                raise TransportError(str(error)) from error
            if self._closing:
                raise TransportError("the server closes")

    def close(self) -> None:
        self._closing = True
        self._listener.close()
