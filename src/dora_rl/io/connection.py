"""The connection between two processes of a run: one way to prove oneself, one framing.

It is a socket of the operating system, of this machine (a path) or of another (`tcp://host:port`).
Both sides first prove that they know the run's key (`io.proof`); until then nothing else is read.
After that frames travel (a length, a tag, then so many bytes) and, where both sides have agreed on
their number, raw bytes in pieces with a tag each, that go from one process's memory to the other's:
no pickle, no copy on the way. Only bytes whose digest came with a tag before have none themselves.
Messages between the controller and a worker are said by `workers.messages`.

A `Link` joins workers of different hosts, with no controller in between. A server answers questions
(small JSON) with an answer (small JSON) and, where the answer announces them, raw bytes. Every wait
on the peer has a deadline; a peer that is silent for longer counts as gone.

    asker                                   server
    connect, proof                 <->      challenge, proof
    question {"kind": ...}          ->      handler(question, link)
    answer {...} | {"error": why}   <-
    bytes                           <->     as the kind says

Descriptors between a parent and its own child (`workers.fork_server`, the sandbox) go over a socket
pair instead, which nobody else can reach.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from dora_rl.io.codec import dumps, loads
from dora_rl.io.proof import (
    BULK,
    FRAME,
    TAG_BYTES,
    AuthenticationError,
    Damaged,
    Proven,
    RunKey,
    Wire,
    prove,
)

CONNECT_S_MAX = 5.0
SILENT_S_MAX = 30.0
PIECE_BYTES = 1 << 20  # of raw bytes, with one tag
JOINED_BYTES_MAX = 1 << 16  # a frame that leaves in one piece with its header
FRAME_BYTES_MAX = 1 << 30
HEADER = struct.Struct(">Q")
AHEAD_BYTES = 1 << 16  # several small frames arrive at once
STRANGERS_MAX = 256  # connections that have not proved themselves yet


class Connection:
    """One end. Sending frames is safe from several threads."""

    def __init__(self, proven: Proven) -> None:
        self._wire, self._sent, self._received = proven.wire, proven.sent, proven.received
        self._lock = threading.Lock()
        self._wire.ahead_bytes_max = AHEAD_BYTES
        if self._wire.is_remote:
            self._wire.answer_at_once(SILENT_S_MAX)

    @classmethod
    def connect(cls, address: str, key: RunKey) -> Self:
        """Raises OSError (nobody is there, or is silent) or AuthenticationError (another key)."""
        if address.startswith("/"):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.connect(address)
        else:
            link = socket.create_connection(host_and_port(address), CONNECT_S_MAX)
        return cls(prove(Wire(link), key, accepts=False))

    def send_frame(self, data: bytes) -> None:
        with self._lock:
            head = HEADER.pack(len(data)) + self._sent.next(FRAME, data)
            if len(data) <= JOINED_BYTES_MAX:
                self._wire.write(head + data)
            else:
                self._wire.write(head)
                self._wire.write(data)

    def receive_frame(self, bytes_max: int = FRAME_BYTES_MAX) -> bytearray:
        """Raises EOFError when the other side is gone, `Damaged` of what it cannot have sent."""
        head = self._wire.read(HEADER.size + TAG_BYTES)
        (num_bytes,) = HEADER.unpack_from(head)
        if num_bytes > bytes_max:
            raise Damaged(f"a frame of {num_bytes} bytes, where {bytes_max} are the most")
        data = self._wire.read(num_bytes)
        self._received.check(FRAME, data, head[HEADER.size :])
        return data

    def poll(self, timeout_s: float) -> bool:
        return self._wire.poll(timeout_s)

    def within(self, seconds: float | None) -> None:
        """How long each wait for the other side may last from now on."""
        self._wire.silent_s_max = seconds

    def write(self, data: bytes | bytearray | memoryview, *, tagged: bool = True) -> None:
        """`tagged` off, on both sides: for bytes whose digest has come with a tag before."""
        view = memoryview(data).cast("B")
        if not tagged:
            self._wire.write(view)
            return
        for at in range(0, len(view), PIECE_BYTES):
            piece = view[at : at + PIECE_BYTES]
            self._wire.write(self._sent.next(BULK, piece))
            self._wire.write(piece)

    def read_into(self, view: memoryview, *, tagged: bool = True) -> None:
        if not tagged:
            self._wire.read_into(view)
            return
        for at in range(0, len(view), PIECE_BYTES):
            tag, piece = self._wire.read(TAG_BYTES), view[at : at + PIECE_BYTES]
            self._wire.read_into(piece)
            self._received.check(BULK, piece, tag)

    def cut(self) -> None:
        """End the connection under whoever reads or writes it; what has arrived is still read."""
        self._wire.cut()

    def close(self) -> None:
        self._wire.close()


class Listener:
    """Where connections come in: a path, or `tcp://host:port` (port 0: one that is free).

    Each is served by a thread of its own: a stranger that says nothing keeps that waiting, nobody
    else, and no longer than it may take to prove itself.
    """

    def __init__(self, address: str) -> None:
        self._closing = False
        if address.startswith("/"):
            self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._door.bind(address)
            self._door.listen(64)
            self.port, self.address = 0, address
        else:
            place = host_and_port(address)
            version = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
            self._door = socket.create_server(place, family=version, backlog=64)
            self.port = int(self._door.getsockname()[1])
            self.address = f"{address.rpartition(':')[0]}:{self.port}"

    def accept_each(
        self, key: RunKey, serve: Callable[[Proven], None], refused: Callable[[], None]
    ) -> None:
        """Until it is closed. `refused`: somebody has not proved itself, or not in time."""
        room = threading.BoundedSemaphore(STRANGERS_MAX)

        def meet(link: socket.socket) -> None:
            try:
                proven = prove(Wire(link), key, accepts=True)
            except (AuthenticationError, OSError, EOFError):
                refused()
                return
            finally:
                room.release()
            serve(proven)

        while not self._closing:
            room.acquire()
            try:
                link, _ = self._door.accept()
            except OSError:
                room.release()
                if not self._closing:
                    time.sleep(0.1)  # out of file descriptors, for a moment
                continue
            threading.Thread(target=meet, args=(link,), daemon=True).start()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
        self._door.close()


def host_and_port(address: str) -> tuple[str, int]:
    """Of `tcp://host:port`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def tcp(host: str, port: int = 0) -> str:
    """The address of a port of a host."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


# -- questions and answers -------------------------------------------------------------------------


QUESTION_BYTES_MAX = 4 << 20


class TransportError(Exception):
    """The peer is gone, silent, or says that it cannot."""


class Refused(TransportError):
    """What was asked for cannot be had. Raised by a handler before it has answered anything."""


class Link(Connection):
    """One end: questions and answers as small JSON, bulk as raw bytes."""

    def __init__(self, proven: Proven) -> None:
        super().__init__(proven)
        self.within(SILENT_S_MAX)

    @classmethod
    def connect(cls, address: str, key: RunKey) -> Self:
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

    def write(self, data: bytes | bytearray | memoryview, *, tagged: bool = True) -> None:
        with _told():
            super().write(data, tagged=tagged)

    def read_into(self, view: memoryview, *, tagged: bool = True) -> None:
        with _told():
            super().read_into(view, tagged=tagged)

    def read(self, num_bytes: int, bytes_max: int) -> bytearray:
        """As many bytes as the other side has announced, if it is no more than it may be."""
        if not 0 <= num_bytes <= bytes_max:
            raise TransportError(f"{num_bytes} bytes are announced, {bytes_max} are the most")
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

    def __init__(self, key: RunKey, handler: Handler, host: str) -> None:
        """`host`: the address of the interface that is listened on."""
        self._handler = handler
        self._listener = Listener(tcp(host))
        self.port = self._listener.port
        self.num_refused = 0
        self._closing = False
        arguments = (key, self._serve, self._refused)
        threading.Thread(target=self._listener.accept_each, args=arguments, daemon=True).start()

    def _refused(self) -> None:
        self.num_refused += 1

    def _serve(self, proven: Proven) -> None:
        with contextlib.suppress(TransportError), contextlib.closing(Link(proven)) as link:
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
