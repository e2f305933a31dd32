"""Training clients: each with a model of its own, their requests one after the other.

Lives on the event loop; passes run in one thread of their own. Never runs two requests at once.
Invariants: the requests of a client run in the order of their numbers, one of each client in turn;
each is answered once, whatever becomes of it; no more than `clients_max` models are there.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dora_rl.io.system_errors import system_line
from dora_rl.tinker.book import Answer, Promise
from dora_rl.tinker.trainee import AdapterShape, Base, Trainee
from dora_rl.tinker.turns import Turns
from dora_rl.types import UserError, Version
from dora_rl.weights.store import WeightsError

GAP_S_MAX = 600.0  # for a request that others of its client wait for


@dataclass(slots=True, eq=False)
class Model:
    """One training client. `snapshots` are those without a name, oldest first, and the sampling
    client of each."""

    id: str
    owner: str
    session: str
    shape: AdapterShape
    trainee: Trainee | None = None
    snapshots: list[tuple[Version, str]] = field(default_factory=list)

    def there(self) -> Trainee:
        if self.trainee is None:
            raise UserError("this training client could not be made; make another one")
        return self.trainee


@dataclass(slots=True, eq=False)
class Job:
    """`run` is called in the thread; on the event loop `then` where it succeeded, or `otherwise`.
    `num_bytes` are held until then."""

    promise: Promise
    run: Callable[[], Answer]
    then: Callable[[], None] = lambda: None
    otherwise: Callable[[], None] = lambda: None
    num_bytes: int = 0


Settle = Callable[[Promise, Answer], None]
Fail = Callable[[Promise, str, bool], None]


class Training:
    """`settle` and `fail` answer a promise."""

    def __init__(
        self,
        device: str,
        num_threads: int,
        settle: Settle,
        fail: Fail,
        now: Callable[[], float],
    ) -> None:
        self._settle, self._fail, self._now = settle, fail, now
        self.models: dict[str, Model] = {}
        self.num_bytes = 0  # of requests that wait or run
        self._turns: Turns[Job] = Turns()
        self._wake = asyncio.Event()

        def begin() -> None:
            if num_threads:
                torch.set_num_threads(num_threads)
            if device.startswith("cuda"):
                torch.cuda.set_device(torch.device(device).index or 0)

        self._thread = ThreadPoolExecutor(1, "dora-rl learner", initializer=begin)

    def open(self, model: Model) -> None:
        """Its first request has number 0 and makes it."""
        self.models[model.id] = model
        self._turns.open(model.id, first_seq=0)

    def close(self, model: Model) -> None:
        del self.models[model.id]
        for job in self._turns.close(model.id):
            self.num_bytes -= job.num_bytes
            self._fail(job.promise, "the session has ended", True)

    def num_waiting(self, model: Model) -> int:
        return self._turns.num_of(model.id)

    def is_past(self, model: Model, seq: int) -> bool:
        return self._turns.is_past(model.id, seq)

    def is_next(self, model: Model, seq: int) -> bool:
        return self._turns.is_next(model.id, seq)

    def is_awaited(self, model: Model, seq: int) -> bool:
        return self._turns.is_awaited(model.id, seq)

    def add(self, model: Model, seq: int, job: Job) -> None:
        self._turns.add(model.id, seq, job, self._now())
        self.num_bytes += job.num_bytes
        self._wake.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            job = self._turns.take()
            if job is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            found = await loop.run_in_executor(self._thread, attempt, job.run)
            answer, error, mine = (
                found if found[0] is None else attempt(partial(after, job, found[0]))
            )
            self.num_bytes -= job.num_bytes
            if answer is None:
                job.otherwise()
                self._fail(job.promise, error, mine)
            else:
                self._settle(job.promise, answer)

    def give_up_gaps(self) -> None:
        for client, seq, jobs in self._turns.overdue(self._now(), GAP_S_MAX):
            line = f"request {seq} of {client} never came, so those after it were not run"
            for job in jobs:
                assert isinstance(job, Job)
                self.num_bytes -= job.num_bytes
                self._fail(job.promise, line, True)

    def stop(self) -> None:
        """When this returns nothing runs."""
        self._thread.shutdown(cancel_futures=True)


def after(job: Job, answer: Answer) -> Answer:
    job.then()
    return answer


def attempt(run: Callable[[], Answer]) -> tuple[Answer | None, str, bool]:
    """An answer, or what was wrong and whether the client can mend it."""
    try:
        return run(), "", True
    except (UserError, WeightsError) as error:
        return None, str(error), True
    except Exception as error:  # noqa: BLE001 - one client's request must not end the others
        line = system_line(error)
        print(f"a training request failed: {type(error).__name__}: {error}", file=sys.stderr)
        return None, line or f"internal error ({type(error).__name__})", False


def made(model: Model, base: Base, load: Callable[[Trainee], Any] = lambda trainee: None) -> None:
    """Make the adapters of a model; `load` fills them."""
    trainee = Trainee(base, model.shape)
    load(trainee)
    model.trainee = trainee
