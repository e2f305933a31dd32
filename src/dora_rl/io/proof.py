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

import hashlib
import hmac
import secrets
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dora_rl.io.wire import Wire

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
