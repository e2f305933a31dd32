"""Who waits at the table: conditions on its one lock, with a deadline and a name for every wait.

Never polls. Invariant: whoever sleeps here is listed in `waiting()` and is woken by the change it
waits for, by its deadline, or by the closing of the table, whichever comes first.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

Sleeper = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody waits; for the watchdog."""

    name: str
    wants: str
    since_s: float


class TableWaits:
    def __init__(
        self, lock: threading.Lock, consumers: Sequence[str], clock: Callable[[], float]
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._room = threading.Condition(lock)
        self._ready = {name: threading.Condition(lock) for name in consumers}
        self._sleepers: dict[str, list[Sleeper]] = {name: [] for name in consumers}
        self._notes: dict[int, Waiting] = {}
        self._keys = count()

    def waiting(self) -> list[Waiting]:
        return list(self._notes.values())

    def wait_room(self, done: Callable[[], bool], timeout_s: float, name: str, wants: str) -> bool:
        """Called with the lock held, as are all the others except `sleep`."""
        with self._noted(name, wants):
            return self._room.wait_for(done, timeout_s)

    def wait_ready(
        self, consumer: str, done: Callable[[], bool], timeout_s: float, name: str, wants: str
    ) -> bool:
        with self._noted(name, wants):
            return self._ready[consumer].wait_for(done, timeout_s)

    async def sleep(
        self, consumer: str, done: Callable[[], bool], timeout_s: float, name: str, wants: str
    ) -> bool:
        """`wait_ready` for an event loop, which goes on meanwhile. Takes the lock itself."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            with self._lock:
                if done():
                    return True
                sleeper = (loop, loop.create_future())
                self._sleepers[consumer].append(sleeper)
                key = self._note(name, wants)
            try:
                await asyncio.wait_for(sleeper[1], deadline - loop.time())
            except TimeoutError:
                return False
            finally:
                with self._lock:
                    del self._notes[key]
                    self._sleepers[consumer].remove(sleeper)

    def ring_room(self) -> None:
        self._room.notify_all()

    def ring_readers(self) -> None:
        for consumer, condition in self._ready.items():
            condition.notify_all()
            for loop, future in self._sleepers[consumer]:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_finish, future)

    def _note(self, name: str, wants: str) -> int:
        key = next(self._keys)
        self._notes[key] = Waiting(name, wants, self._clock())
        return key

    @contextmanager
    def _noted(self, name: str, wants: str) -> Iterator[None]:
        key = self._note(name, wants)
        try:
            yield
        finally:
            del self._notes[key]


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
