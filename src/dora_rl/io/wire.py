"""Bytes over one socket, with deadlines, plain or under TLS.

Knows nothing of who is at the other end: `io.proof` does. Reads and writes whole buffers; one
thread may read while another writes, also under TLS, whose state is no two threads' at once.
Invariant: while a deadline or a longest silence is set, no call waits for longer than that.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar

KEEPALIVES = 3
CERTIFICATE_WANTED = "the other side has no certificate"
Result = TypeVar("Result")


class Wire:
    """One end of a socket, which it owns."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._link = link
        self._turns: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self.silent_s_max: float | None = None  # for each wait
        self.until_s: float | None = None  # for all waits, by the monotonic clock

    @property
    def is_remote(self) -> bool:
        return self._link.family != socket.AF_UNIX

    def secure(self, context: ssl.SSLContext, accepts: bool) -> bytes:
        """Speak TLS from here on; returns the other side's certificate."""
        link = context.wrap_socket(self._link, accepts, do_handshake_on_connect=False)
        self._link, self._turns = link, threading.Lock()
        self._go_on(link.do_handshake, select.POLLIN)
        certificate = link.getpeercert(binary_form=True)
        if certificate is None:
            raise ssl.SSLError(CERTIFICATE_WANTED)
        return certificate

    def read_into(self, view: memoryview) -> None:
        """Raises EOFError when the other side is gone."""
        at = 0
        while at < len(view):
            count = self._go_on(lambda: self._link.recv_into(view[at:]), select.POLLIN)  # noqa: B023
            if not count:
                raise EOFError("the connection ended")
            at += count

    def read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.read_into(memoryview(data))
        return data

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view, at = memoryview(data).cast("B"), 0
        while at < len(view):
            at += self._go_on(lambda: self._link.send(view[at:]), select.POLLOUT)  # noqa: B023

    def _go_on(self, act: Callable[[], Result], wants: int) -> Result:
        while True:
            try:
                with self._turns:
                    return act()
            except ssl.SSLWantReadError:
                wants = select.POLLIN
            except ssl.SSLWantWriteError:
                wants = select.POLLOUT
            except BlockingIOError:
                pass
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
        if isinstance(self._link, ssl.SSLSocket):
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
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silent_s_max * 1e3))

    def cut(self) -> None:
        """End the connection under whoever reads or writes it; what has arrived is still read."""
        # The plain socket's own method: that of TLS would forget that it is TLS.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._link, socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._link.close()
