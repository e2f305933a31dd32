"""Messages between the controller and its workers: a JSON header and raw arrays, no pickle.

A connection is a socket of the operating system on which both sides first prove that they know
the run's key (HMAC challenge of `multiprocessing.connection`); after that only bytes travel.

    u32 header length | header JSON {"kind", "body", "arrays": [[name, dtype, length], ...]} | bytes
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.core.events import Event
from dora_rl.io.codec import dumps, loads, rule
from dora_rl.ports import FleetAction, LearnerAction

encode_event, decode_event = rule(Event)
encode_fleet, decode_fleet = rule(FleetAction)
encode_learner, decode_learner = rule(LearnerAction)

_LENGTH = struct.Struct("<I")
_DTYPES = {"<i4", "<i8", "<f4", "<f8", "|u1"}


@dataclass(frozen=True, slots=True)
class Message:
    """`kind` says what to do with `body`; one-dimensional arrays travel beside it as bytes."""

    kind: str
    body: dict[str, Any]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


def pack(kind: str, body: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    shapes = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    header = dumps({"kind": kind, "body": body, "arrays": shapes})
    parts = [_LENGTH.pack(len(header)), header]
    parts.extend(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return b"".join(parts)


def unpack(data: bytes) -> Message:
    (length,) = _LENGTH.unpack_from(data)
    header = loads(data[4 : 4 + length])
    arrays: dict[str, NDArray[Any]] = {}
    at = 4 + length
    for name, dtype, count in header["arrays"]:
        if dtype not in _DTYPES:
            raise ValueError(f"an array of type {dtype!r} does not travel")
        size = np.dtype(dtype).itemsize * count
        arrays[name] = np.frombuffer(data[at : at + size], dtype=dtype)
        at += size
    return Message(header["kind"], header["body"], arrays)


class Channel:
    """One end of a connection. Sending is safe from several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, address: str, key: bytes) -> Channel:
        """To a socket of this machine (a path) or of another (`tcp://host:port`)."""
        if address.startswith("/"):
            return cls(Client(address, family="AF_UNIX", authkey=key))
        connection = Client(host_and_port(address), family="AF_INET", authkey=key)
        answer_at_once(connection)
        return cls(connection)

    def send(
        self, kind: str, body: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        self.send_packed(pack(kind, body, arrays or {}))

    def send_packed(self, data: bytes) -> None:
        with self._lock:
            self._connection.send_bytes(data)

    def send_event(self, event: Event) -> None:
        self.send("event", encode_event(event))

    def poll(self, timeout_s: float) -> bool:
        return self._connection.poll(timeout_s)

    def receive(self) -> Message:
        """Raises EOFError when the other side is gone."""
        return unpack(self._connection.recv_bytes())

    def cut(self) -> None:
        """End the connection under whoever reads or writes it; what has arrived is still read."""
        with contextlib.suppress(OSError), _socket_of(self._connection) as link:
            link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def host_and_port(address: str) -> tuple[str, int]:
    """Of `tcp://host:port`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def answer_at_once(connection: Connection, silent_s_max: float = 30.0) -> None:
    """Small messages leave at once, and a peer that has vanished without a word is noticed."""
    with _socket_of(connection) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(silent_s_max / 3))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(silent_s_max / 3))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s_max * 1e3))


def _socket_of(connection: Connection) -> socket.socket:
    """The same socket under a handle of its own."""
    return socket.socket(fileno=os.dup(connection.fileno()))
