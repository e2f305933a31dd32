"""A run in one process, without threads: for a debugger in a reward or a loss, and for reading.

The controller, its ports and its log are those of any run. Workers are objects here: what one is
sent it does in its next turn, what it says lies in the inbox at once. They take turns while the
inbox is empty, so the same run has the same order of events every time. Slower than processes, and
nothing protects the run from a worker that hangs or ends the interpreter.

Invariant: with `orchestration.max_staleness = 0` trajectories and weights are those of the local
world, bit for bit.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import torch

from dora_rl.config import RunConfig
from dora_rl.controller.run import Run
from dora_rl.controller.run_dir import RunFiles
from dora_rl.setup.prepare import Prepared
from dora_rl.user_code import listen
from dora_rl.workers import messages as msg
from dora_rl.workers.environment import open_host, take_step
from dora_rl.workers.evaluator import Evaluator
from dora_rl.workers.last_words import send_user_errors
from dora_rl.workers.learner import LearnerWorker
from dora_rl.workers.pool import Envelope, Worker
from dora_rl.workers.reward import Scorer
from dora_rl.workers.rollout import RolloutWorker
from dora_rl.workers.worker import Role, Setup, parting, read_setup
from dora_rl.worlds.local import open_on_one_host

IDLE_S = 0.001
STANDS_S = 1.0  # of a turn; for what it takes longer the clock stands
REPORT_S = 1.0


def open_inline(prepared: Prepared, *, resume: bool, workers: InlineWorkers | None = None) -> Run:
    """A test brings `workers` of its own, to have its hands on them."""
    found = workers or InlineWorkers(prepared.config)

    def workers_of(files: RunFiles) -> InlineWorkers:
        found.first_incarnation = files.journals.next_incarnation()
        return found

    return open_on_one_host(prepared, workers_of, resume=resume)


class InlineProcess:
    """What stands for a worker's process. Implements `pool.Process`."""

    def __init__(self) -> None:
        self.role: Role | None = None
        self.inbox: deque[msg.Message] = deque()
        self.num_threads = 0  # of torch, as the worker has set it
        self.has_ended = False

    def poll(self) -> int | None:
        return 1 if self.has_ended else None

    def wait(self, timeout: float | None = None) -> int:
        assert self.has_ended
        return 1

    def kill(self) -> None:
        if self.role is not None:
            self.role.drop()
        self.role, self.has_ended = None, True


class InlineWorkers:
    """Implements `pool.Workers`. Its clock stands while a worker takes its time, in a debugger
    say: nobody is given up for that."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self.first_incarnation = config, 0
        self._said: deque[Envelope] = deque()
        self._processes: dict[str, InlineProcess] = {}
        self._stood_s = 0.0
        self.workers: dict[str, Worker] = {}
        self.closing = False

    def now(self) -> float:
        return time.monotonic() - self._stood_s

    def start(self, role: str, name: str, extra: dict[str, Any]) -> Worker:
        """It is made in its first turn."""
        before, process = self.workers.get(name), InlineProcess()
        incarnation = self.first_incarnation if before is None else before.incarnation + 1
        worker = Worker(role, name, incarnation, process, extra, self.now())
        self.workers[name], self._processes[name] = worker, process
        return worker

    def _setup_of(self, worker: Worker) -> Setup:
        setup = {
            "role": worker.role,
            "name": worker.name,
            "incarnation": worker.incarnation,
            "address": "",
            "key": "",
            "run_dir": self._config.runtime.run_dir,
            "config": self._config.model_dump(mode="json"),
            "extra": worker.extra,
        }
        return read_setup(json.dumps(setup))

    def _say(self, worker: Worker, message: msg.Message | None) -> None:
        if not isinstance(message, msg.Saving):
            self._said.append(Envelope(worker.name, worker.role, worker.incarnation, message))

    def next_said(self, wait_s: float) -> Envelope | None:
        """Every worker takes a turn while nobody has said anything."""
        until = time.monotonic() + wait_s
        while not self._said and time.monotonic() < until:
            turns = [self._turn(worker) for worker in list(self.workers.values())]
            if not any(turns) and not self._said:
                time.sleep(IDLE_S)
        return self._said.popleft() if self._said else None

    def _turn(self, worker: Worker) -> bool:
        """True: it had something to do."""
        process, began = self._processes[worker.name], time.monotonic()
        if process.has_ended:
            return False
        send = partial(self._say, worker)
        listen(send_user_errors(send))
        try:
            return self._work(worker, process, send)
        except Exception as error:  # noqa: BLE001 - as of a process: its last words, and its end
            last = parting(self._setup_of(worker), error)
            send(last)
            if isinstance(last, msg.Fault):  # else its line says it all
                traceback.print_exc()
            self.kill(worker.name)
            return True
        finally:
            self._stood_s += max(0.0, time.monotonic() - began - STANDS_S)

    def _work(self, worker: Worker, process: InlineProcess, send: msg.Send) -> bool:
        if process.role is None:
            process.role = ROLES[worker.role](self._setup_of(worker), send)
            process.role.join()
            process.num_threads = torch.get_num_threads()
            return True
        torch.set_num_threads(process.num_threads)
        heard = bool(process.inbox)
        while process.inbox:
            process.role.hear(process.inbox.popleft())
        return process.role.turn() or heard

    def restart(self, name: str) -> None:
        self.kill(name)
        self.start(self.workers[name].role, name, self.workers[name].extra)

    def kill(self, name: str) -> None:
        process = self._processes[name]
        if not process.has_ended:
            process.kill()
            self._say(self.workers[name], None)

    def send(self, name: str, message: msg.Message) -> None:
        if name in self._processes:
            self._processes[name].inbox.append(message)

    def is_current(self, envelope: Envelope) -> bool:
        worker = self.workers.get(envelope.name)
        return worker is not None and worker.incarnation == envelope.incarnation

    def overdue(self, limit_s: float) -> list[str]:
        return []

    def log_tail(self, name: str) -> str:
        """Workers write to the console of this process."""
        return ""

    def end(self, grace_s: float) -> None:
        self.closing = True
        for process in self._processes.values():
            if process.role is not None:
                process.role.close()
        self.kill_all()

    def kill_all(self) -> None:
        self.closing = True
        for process in self._processes.values():
            process.kill()
        listen(None)


class AtOnce(Executor):
    """Does what it is given before it returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            done.set_exception(error)
        return done


class InlineLearner(Role):
    def __init__(self, setup: Setup, send: msg.Send) -> None:
        super().__init__(setup, send)
        self._worker = LearnerWorker(setup, send, AtOnce())
        self._reported_s = time.monotonic()
        self.join, self.hear, self.close = (
            self._worker.join,
            self._worker.hear,
            self._worker.close,
        )

    def turn(self) -> bool:
        if time.monotonic() - self._reported_s > REPORT_S:
            self._reported_s = time.monotonic()
            self._worker.report()
        has_work = self._worker.has_own_work()
        if has_work:
            self._worker.go_on()
        return has_work

    def drop(self) -> None:
        if self._worker.start.lock is not None:
            os.close(self._worker.start.lock)


class InlineEnvironment(Role):
    def __init__(self, setup: Setup, send: msg.Send) -> None:
        super().__init__(setup, send)
        self._host, self._loop = open_host(setup), asyncio.new_event_loop()

    def hear(self, message: msg.Message) -> None:
        if isinstance(message, msg.Forget):
            self._host.forget(message.group)
            return
        assert isinstance(message, msg.Step)
        self.send(self._loop.run_until_complete(take_step(self._host, message)))

    def drop(self) -> None:
        self._host.close()
        self._loop.close()


ROLES: dict[str, type[Role]] = {
    "instance": RolloutWorker,
    "learner": InlineLearner,
    "reward": Scorer,
    "env": InlineEnvironment,
    "evaluator": Evaluator,
}
