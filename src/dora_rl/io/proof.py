"""How two processes of a run prove themselves to each other, and every byte after that.

Both know the run's key, which never travels. The acceptor sends a random challenge, the connector
one of its own with its proof, the acceptor its proof; each is an HMAC-SHA256 over a word that names
the side and both challenges. Two keys come of the same, one per direction: all that follows is sent
in pieces, each with a keyed BLAKE2b of its number and its bytes, so that a piece that was changed,
left out or sent again ends the connection.

Where the user has given certificates, all that is inside TLS, whose two certificates are part of
what is proven: whoever has a certificate of the same authority and not the key can pass nothing on.
Never keeps a stranger for longer than `PROOF_S_MAX`, nor reads more of it than its proof.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

# -------------------------------------------------------------------------------------------------
# Bytes over one socket, with deadlines, plain or under TLS.
#
# Knows nothing of who is at the other end: what is below does. Reads and writes whole buffers; one
# thread may read while another writes, also under TLS, whose state is no two threads' at once.
# Invariant: while a deadline or a longest silence is set, no call waits for longer than that.


KEEPALIVES = 3
CERTIFICATE_WANTED = "the other side has no certificate"
Result = TypeVar("Result")


class Wire:
    """One end of a socket, which it owns. What is waited for without a limit is waited for by the
    system: a call for each wait, however many threads there are."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(True)
        self._link = link
        self._turns: threading.Lock | None = None  # under TLS
        self.silent_s_max: float | None = None  # for each wait
        self.until_s: float | None = None  # for all waits, by the monotonic clock
        # As much is taken at once where less is wanted; 0: never more than is wanted, since it may
        # be somebody else's (the next protocol's, a stranger's).
        self.ahead_bytes_max = 0
        self._ahead = memoryview(b"")

    @property
    def is_remote(self) -> bool:
        return self._link.family != socket.AF_UNIX

    def secure(self, context: ssl.SSLContext, accepts: bool) -> bytes:
        """Speak TLS from here on; returns the other side's certificate."""
        self._link.setblocking(False)
        link = context.wrap_socket(self._link, accepts, do_handshake_on_connect=False)
        self._link, self._turns = link, threading.Lock()
        self._take_turns(self._turns, link.do_handshake, select.POLLIN)
        certificate = link.getpeercert(binary_form=True)
        if certificate is None:
            raise ssl.SSLError(CERTIFICATE_WANTED)
        return certificate

    def read_into(self, view: memoryview) -> None:
        """Raises EOFError when the other side is gone."""
        at = 0
        while at < len(view):
            if not self._ahead and len(view) - at < self.ahead_bytes_max:
                more = memoryview(bytearray(self.ahead_bytes_max))
                self._ahead = more[: self._receive(more)]
            if self._ahead:
                count = min(len(self._ahead), len(view) - at)
                view[at : at + count], self._ahead = self._ahead[:count], self._ahead[count:]
            else:
                count = self._receive(view[at:])
            at += count

    def read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.read_into(memoryview(data))
        return data

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view, at = memoryview(data).cast("B"), 0
        while at < len(view):
            rest = view[at:]
            at += self._go_on(lambda flags: self._link.send(rest, flags), select.POLLOUT)  # noqa: B023

    def _receive(self, view: memoryview) -> int:
        """Some bytes, one at least."""
        count = self._go_on(lambda flags: self._link.recv_into(view, 0, flags), select.POLLIN)
        if not count:
            raise EOFError("the connection ended")
        return count

    def _go_on(self, act: Callable[[int], int], wants: int) -> int:
        if self._turns is not None:
            return self._take_turns(self._turns, lambda: act(0), wants)
        while self.silent_s_max is not None or self.until_s is not None:
            self._wait(wants)
            with contextlib.suppress(BlockingIOError):
                return act(socket.MSG_DONTWAIT)
        return act(0)

    def _take_turns(self, turns: threading.Lock, act: Callable[[], Result], wants: int) -> Result:
        """TLS: what it waits for is not always what is wanted."""
        while True:
            try:
                with turns:
                    return act()
            except ssl.SSLWantReadError:
                wants = select.POLLIN
            except ssl.SSLWantWriteError:
                wants = select.POLLOUT
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError) as error:
                raise EOFError("the connection ended") from error
            self._wait(wants)

    def _wait(self, wants: int) -> None:
        wait_s = self.silent_s_max
        if self.until_s is not None:
            left_s = max(0.0, self.until_s - time.monotonic())
            wait_s = left_s if wait_s is None else min(left_s, wait_s)
        if not self._ready(wants, wait_s):
            late = "it took too long" if self.until_s is not None else f"silent for {wait_s:g} s"
            raise TimeoutError(f"the other side gave no answer: {late}")

    def _ready(self, wants: int, wait_s: float | None) -> bool:
        number = self._link.fileno()
        if number < 0:
            raise OSError("the connection was closed here")
        poll = select.poll()
        poll.register(number, wants)
        return bool(poll.poll(None if wait_s is None else wait_s * 1e3))

    def poll(self, wait_s: float) -> bool:
        """Whether something can be read, or the other side is gone."""
        if self._ahead:
            return True
        if isinstance(self._link, ssl.SSLSocket) and self._turns is not None:
            with self._turns:
                if self._link.pending():
                    return True
        return self._ready(select.POLLIN, wait_s)

    def answer_at_once(self, silent_s_max: float) -> None:
        """Small messages leave at once, and a peer that has vanished without a word is noticed."""
        link = self._link
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            every_s = int(silent_s_max / KEEPALIVES)
            for option, value in (
                (socket.TCP_KEEPIDLE, every_s),
                (socket.TCP_KEEPINTVL, every_s),
                (socket.TCP_KEEPCNT, KEEPALIVES),
                (socket.TCP_USER_TIMEOUT, int(silent_s_max * 1e3)),
            ):
                link.setsockopt(socket.IPPROTO_TCP, option, value)

    def cut(self) -> None:
        """End the connection under whoever reads or writes it; what has arrived is still read."""
        # The plain socket's own method: that of TLS would forget that it is TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._link, socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._link.close()


# -------------------------------------------------------------------------------------------------


PROOF_S_MAX = 60.0  # for the other side to prove itself, on a machine however busy
GREETING = b"dora-rl connection 2\n"
CHALLENGE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16
REFUSAL = bytes(PROOF_BYTES)
FRAME, BULK = 0, 1  # what a piece is


class AuthenticationError(Exception):
    """The other side does not know the run's key, or we do not."""


class Damaged(ConnectionError):
    """What arrived is not what was sent; the connection is of no use any more."""


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files: this host's certificate and its key, and who signs those of all hosts."""

    certificate: str
    private_key: str
    authority: str

    @cached_property
    def own(self) -> bytes:
        text = Path(self.certificate).read_text()
        end = "-----END CERTIFICATE-----"
        return ssl.PEM_cert_to_DER_cert(
            text[text.index("-----BEGIN") : text.index(end) + len(end)] + "\n"
        )

    @cached_property
    def for_acceptor(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    @cached_property
    def for_connector(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def check(self) -> None:
        """Raises OSError (of which ssl's errors are) or ValueError where they cannot be used."""
        _ = self.own, self.for_acceptor, self.for_connector

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # hosts are addresses that come and go; the key says who
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.certificate, self.private_key)
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # nothing is to be read where nothing was said
        return context


@dataclass(frozen=True, slots=True)
class RunKey:
    """What a process of a run proves itself with."""

    secret: bytes
    certificates: Certificates | None = None


class Tags:
    """Of one direction: the tag of each piece, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def next(self, kind: int, data: bytes | bytearray | memoryview) -> bytes:
        tag = hashlib.blake2b(key=self._key, digest_size=TAG_BYTES)
        tag.update(struct.pack(">QBQ", self._number, kind, len(data)))
        tag.update(data)
        self._number += 1
        return tag.digest()

    def check(self, kind: int, data: bytearray | memoryview, tag: bytes | bytearray) -> None:
        if not hmac.compare_digest(self.next(kind, data), bytes(tag)):
            raise Damaged("what arrived is not what the other side has sent")


@dataclass(frozen=True, slots=True)
class Proven:
    """A wire whose other end is a process of this run."""

    wire: Wire
    sent: Tags
    received: Tags


def prove(wire: Wire, key: RunKey, *, accepts: bool, wait_s_max: float = PROOF_S_MAX) -> Proven:
    """Raises AuthenticationError, OSError or EOFError; the wire is closed then."""
    wire.until_s = time.monotonic() + wait_s_max
    try:
        both = _certificates(wire, key, accepts)
        proven = _accept(wire, key.secret, both) if accepts else _connect(wire, key.secret, both)
    except BaseException:
        wire.close()
        raise
    wire.until_s = None
    return proven


def _certificates(wire: Wire, key: RunKey, accepts: bool) -> bytes:
    """TLS, where the bytes leave this machine; digests of the acceptor's and the connector's."""
    ours = key.certificates
    if ours is None or not wire.is_remote:
        return b""
    theirs = wire.secure(ours.for_acceptor if accepts else ours.for_connector, accepts)
    pair = (ours.own, theirs) if accepts else (theirs, ours.own)
    return b"".join(hashlib.sha256(certificate).digest() for certificate in pair)


def _accept(wire: Wire, secret: bytes, certificates: bytes) -> Proven:
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    wire.write(GREETING + challenge)
    answer = bytes(wire.read(CHALLENGE_BYTES + PROOF_BYTES))
    theirs, proof = answer[:CHALLENGE_BYTES], answer[CHALLENGE_BYTES:]
    derive = _deriver(secret, challenge + theirs + certificates)
    if not hmac.compare_digest(derive(b"connector"), proof):
        wire.write(REFUSAL)
        raise AuthenticationError("the other side does not know the run's key")
    wire.write(derive(b"acceptor"))
    return Proven(wire, Tags(derive(b"to the connector")), Tags(derive(b"to the acceptor")))


def _connect(wire: Wire, secret: bytes, certificates: bytes) -> Proven:
    greeting = bytes(wire.read(len(GREETING) + CHALLENGE_BYTES))
    if not greeting.startswith(GREETING):
        raise AuthenticationError("the other side is no dora-rl of this version")
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    derive = _deriver(secret, greeting[len(GREETING) :] + challenge + certificates)
    wire.write(challenge + derive(b"connector"))
    proof = bytes(wire.read(PROOF_BYTES))
    if proof == REFUSAL:
        raise AuthenticationError("the other side has another key")
    if not hmac.compare_digest(derive(b"acceptor"), proof):
        raise AuthenticationError("the other side does not know the run's key")
    return Proven(wire, Tags(derive(b"to the acceptor")), Tags(derive(b"to the connector")))


def _deriver(secret: bytes, shared: bytes) -> Callable[[bytes], bytes]:
    return lambda what: hmac.digest(secret, what + b"\0" + shared, "sha256")
