"""The connection between two processes of a run: one way to prove oneself, one framing.

It is a socket of the operating system, of this machine (a path) or of another (`tcp://host:port`).
Both sides first prove by HMAC that they know the run's key (the challenge of
`multiprocessing.connection`); until then nothing else is read, and a side that is silent for too
long is given up. After that frames travel (a length, then so many bytes) and, where both sides have
agreed on their number, raw bytes that go from one process's memory to the other's: no pickle, no
copy on the way. Messages between the controller and a worker are said by `workers.messages`.

A `Link` joins workers of different hosts, with no controller in between. A server answers questions
(small JSON) with an answer (small JSON) and, where the answer announces them, raw bytes. Every wait
on the peer has a deadline; a peer that is silent for longer counts as gone.

    asker                                   server
    connect, challenge, answer     <->      challenge, answer
    question {"kind": ...}          ->      handler(question, link)
    answer {...} | {"error": why}   <-
    bytes                           <->     as the kind says

Descriptors between a parent and its own child (`workers.fork_server`, the sandbox) go over a socket
pair instead, which nobody else can reach.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection as Raw
from multiprocessing.connection import Listener, answer_challenge, deliver_challenge
from typing import Any, Self

from dora_rl.io.codec import dumps, loads

CONNECT_S_MAX = 5.0
PROOF_S_MAX = 60.0  # for the other side to prove itself, on a machine however busy
SILENT_S_MAX = 30.0
SEND_BYTES = 4 << 20  # of one system call


class Connection:
    """One end. Sending frames is safe from several threads."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None  # for raw bytes

    @classmethod
    def connect(cls, address: str, key: bytes) -> Self:
        """Raises OSError (nobody is there, or is silent) or AuthenticationError (another key)."""
        if address.startswith("/"):
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            plain.connect(address)
        else:
            plain = socket.create_connection(host_and_port(address), CONNECT_S_MAX)
            plain.settimeout(None)
        raw = Raw(plain.detach())
        try:
            with _deadline(raw, PROOF_S_MAX):
                answer_challenge(raw, key)
                deliver_challenge(raw, key)
        except BaseException:
            raw.close()
            raise
        if not address.startswith("/"):
            answer_at_once(raw)
        return cls(raw)

    def send_frame(self, data: bytes) -> None:
        with self._lock:
            self._raw.send_bytes(data)

    def receive_frame(self, bytes_max: int | None = None) -> bytes:
        """Raises EOFError when the other side is gone, OSError when a frame is too long."""
        return self._raw.recv_bytes(bytes_max)

    def poll(self, timeout_s: float) -> bool:
        return self._raw.poll(timeout_s)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view, link = memoryview(data).cast("B"), self._bulk()
        for at in range(0, len(view), SEND_BYTES):
            link.sendall(view[at : at + SEND_BYTES])

    def read_into(self, view: memoryview) -> None:
        at, link = 0, self._bulk()
        while at < len(view):
            count = link.recv_into(view[at:])
            if not count:
                raise EOFError("the connection ended in the middle")
            at += count

    def _bulk(self) -> socket.socket:
        if self._socket is None:
            self._socket = _socket_of(self._raw)
        return self._socket

    def cut(self) -> None:
        """End the connection under whoever reads or writes it; what has arrived is still read."""
        with contextlib.suppress(OSError), _socket_of(self._raw) as link:
            link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._raw.close()


def accept_each(
    listener: Listener, is_closing: Callable[[], bool], serve: Callable[[Raw], None]
) -> None:
    """Until the listener is closed. Each connection is served by a thread of its own: a stranger
    that says nothing keeps that waiting, nobody else."""
    while not is_closing():
        try:
            raw = listener.accept()
        except OSError:
            if not is_closing():
                time.sleep(0.1)  # out of file descriptors, for a moment
            continue
        threading.Thread(target=serve, args=(raw,), daemon=True).start()


def greet(raw: Raw, key: bytes, wait_s_max: float = PROOF_S_MAX) -> None:
    """Of whoever accepts: the other side proves itself, then we do. Raises AuthenticationError,
    OSError, EOFError or ValueError; the connection is then of no use."""
    with _deadline(raw, wait_s_max):
        deliver_challenge(raw, key)
        answer_challenge(raw, key)


def host_and_port(address: str) -> tuple[str, int]:
    """Of `tcp://host:port`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def answer_at_once(raw: Raw, silent_s_max: float = SILENT_S_MAX) -> None:
    """Small messages leave at once, and a peer that has vanished without a word is noticed."""
    with _socket_of(raw) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(silent_s_max / 3))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(silent_s_max / 3))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s_max * 1e3))


def wait_at_most(raw: Raw, seconds: float) -> None:
    """For each read and write; 0: as long as it takes. A wait that is over raises an OSError."""
    wait = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with _socket_of(raw) as link:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            link.setsockopt(socket.SOL_SOCKET, option, wait)


@contextlib.contextmanager
def _deadline(raw: Raw, seconds: float) -> Iterator[None]:
    wait_at_most(raw, seconds)
    try:
        yield
    except BlockingIOError as error:
        raise TimeoutError(f"the other side was silent for {seconds:g} s") from error
    wait_at_most(raw, 0)


def _socket_of(raw: Raw) -> socket.socket:
    """The same socket under a handle of its own."""
    return socket.socket(fileno=os.dup(raw.fileno()))


# -- questions and answers -------------------------------------------------------------------------


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
        self._closing = False
        arguments = (self._listener, lambda: self._closing, self._serve)
        threading.Thread(target=accept_each, args=arguments, daemon=True).start()

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
                with _told():
                    asks = link.poll(1.0)
                if not asks:
                    continue  # an idle asker is no fault
                question = link.hear()
                try:
                    self._handler(question, link)
                except Refused as error:
                    link.say({"error": str(error)})

    def close(self) -> None:
        self._closing = True
        self._listener.close()
