"""Calling the user's code with a time limit, synchronous or not.

A synchronous call is interrupted by an exception: raised by a timer signal in the main thread
(which also stops a runaway regular expression or a power with millions of digits), or injected
into any other thread (which stops Python code only; so workers score in their main thread). What
holds the interpreter in foreign code cannot be stopped from inside; the process that owns the
worker is the outer guard. Asynchronous calls run on one event loop in a thread of its own, so
that they work whether or not the caller is itself inside a loop. Invariant: no call outlives its
limit silently.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

# Code that swallows the interruption (`except: pass` in a loop) is interrupted again.
AGAIN_S = 0.25


class Expired(BaseException):
    """Not an `Exception`: the user's `except Exception` must not swallow it."""


@contextmanager
def deadline(timeout_s: float) -> Iterator[None]:
    """Raise `Expired` in the body once `timeout_s` have passed."""
    if threading.current_thread() is threading.main_thread():
        with _alarm(timeout_s):
            yield
    else:
        with _injected(timeout_s):
            yield


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    def expire(*_: object) -> None:
        raise Expired

    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s, AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _injected(timeout_s: float) -> Iterator[None]:
    target = ctypes.c_ulong(threading.get_ident())
    inject = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock, done = threading.Lock(), threading.Event()

    def watch() -> None:
        wait_s = timeout_s
        while not done.wait(wait_s):
            wait_s = AGAIN_S
            with lock:
                if not done.is_set():
                    inject(target, ctypes.py_object(Expired))

    watcher = threading.Thread(target=watch, name="reward-deadline", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with lock:
            done.set()
            # An exception that is set but not yet raised would hit whatever runs next.
            inject(target, None)


class LoopThread:
    """One event loop in a daemon thread. A forked child gets its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="reward-loop", daemon=True
        )
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


_loops: list[LoopThread] = []
_loops_lock = threading.Lock()


def run_async(coroutine: Coroutine[Any, Any, T], guard_s: float) -> T:
    """Run to the end on the loop thread; `Expired` if the loop itself is blocked for `guard_s`."""
    with _loops_lock:
        if not _loops or _loops[0].pid != os.getpid():
            _loops[:] = [LoopThread()]
        thread = _loops[0]
    future = thread.submit(coroutine)
    try:
        return future.result(guard_s)
    except concurrent.futures.TimeoutError as error:
        future.cancel()
        with _loops_lock:
            # Blocking code holds this loop; the next call gets a new one.
            if _loops and _loops[0] is thread:
                _loops.clear()
        raise Expired from error
