"""The server that carries an application over HTTP, and its limits on connections and time.

A connection has so long for the header of a request, for its body and for taking what is written;
who needs longer is closed. One connection too many is answered with 503. Never looks into a body.
Invariant: no wait for a client is without a deadline, and the bytes of bodies that are held at once
are within their limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from dora_rl.chat.requests import ApiError, bad_request, body_too_large, overloaded

BACKLOG = 1024  # connections that may wait to be accepted
# Taken from one connection at a time: the others wait while it is parsed, which in chunks of one
# byte takes a thousand times as long as in one piece.
READ_BYTES_MAX = 8 << 10
CLOSING = "closing"  # the last of an answer is on its way
CLOSED_AT = 2  # times `connections_max`: from there on nothing is said


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What clients of one server may use together and alone."""

    connections_max: int = 512
    head_bytes_max: int = 64 << 10
    head_s_max: float = 10.0  # for the header of a request, from the connection or the last answer
    body_s_max: float = 120.0  # for all of its body
    write_s_max: float = 60.0  # for taking what is written
    body_bytes_max: int = 16 << 20
    bodies_bytes_max: int = 256 << 20  # of all requests that are being read


class Bodies:
    """Reads bodies within the limits, and counts what is held."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self.num_bytes = 0

    @contextlib.asynccontextmanager
    async def hold(self, request: Request) -> AsyncIterator[bytes]:
        """The bytes of a body, until the block is left."""
        chunks: list[bytes] = []
        size = 0
        most = self._limits.body_bytes_max
        try:
            if declared(request) > most:
                raise body_too_large(most)
            async for chunk in request.stream():
                size += len(chunk)
                self.num_bytes += len(chunk)
                if size > most:
                    raise body_too_large(most)
                if self.num_bytes > self._limits.bodies_bytes_max:
                    raise overloaded("bodies_bytes_max", self._limits.bodies_bytes_max)
                chunks.append(chunk)
            body = b"".join(chunks)
            chunks.clear()
            yield body
        except ClientDisconnect:
            raise bad_request("the body did not arrive") from None
        finally:
            self.num_bytes -= size


def declared(request: Request) -> int:
    """How long the client says its body is; the protocol has checked that it is a number."""
    length = request.headers.get("content-length", "0")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


class Patient(H11Protocol):
    """A connection that waits for its client, but not for ever."""

    limits: HttpLimits

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._waits_for: Any = None
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = READ_BYTES_MAX
        most = self.limits.connections_max
        if len(self.connections) > CLOSED_AT * most:
            transport.abort()
        elif len(self.connections) > most:
            self.app = refuse_all(overloaded("connections_max", most))
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waits_for = None  # the next header has its own time
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._deadline, self._write_deadline):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        later = self.loop.call_later
        self._write_deadline = later(self.limits.write_s_max, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _watch(self) -> None:
        """Each part of a request has one deadline, however often some bytes of it come."""
        state = CLOSING if self.transport.is_closing() else self.conn.their_state
        if state is self._waits_for:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._waits_for = state
        limits = self.limits
        waits_s = {h11.IDLE: limits.head_s_max, h11.SEND_BODY: limits.body_s_max}
        wait_s = (waits_s | {CLOSING: limits.write_s_max}).get(state)
        if wait_s is not None:
            self._deadline = self.loop.call_later(wait_s, self.transport.abort)


def refuse_all(error: ApiError) -> Any:
    """An application that answers everything with this error, and closes."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        body = json.dumps(error.body()).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers += [(name.lower().encode(), text.encode()) for name, text in error.headers.items()]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return refuse


def tcp_socket(family: int = socket.AF_INET) -> socket.socket:
    """To be listened on. An event loop sends small pieces of an answer at once only where the
    socket names its protocol; otherwise an answer waits 40 ms until the client acknowledges its
    head."""
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)


class HttpServer(uvicorn.Server):
    """Carries an application over HTTP; signals are the caller's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: Any, limits: HttpLimits, grace_s: float = 1.0) -> HttpServer:
    """`await server.serve(sockets=[...])`; `grace_s` is for answers on their way at the end."""
    config = uvicorn.Config(
        app,
        http=type("Patient", (Patient,), {"limits": limits}),
        h11_max_incomplete_event_size=limits.head_bytes_max,
        ws="none",
        log_level="error",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(grace_s),
    )
    return HttpServer(config)
