"""Many simulated runs at once: searches say which runs they need next, processes perform them.

A flow is a generator that yields the runs it wants and is sent their results, so a search reads
like plain code and never knows who performs it. Invariant: the same job is performed once, and
what a flow returns does not depend on the number of workers.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.presets import Preset
from dora_rl.sim.run import ModeResult, run_mode
from dora_rl.sim.timeline import Timeline
from dora_rl.types import Mode, UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """One run. `rollout_devices` None lets the preset decide; `log` is a folder for its events."""

    preset: Preset
    mode: Mode
    seed: int
    rollout_devices: int | None = None
    with_timeline: bool = False
    log: Path | None = None


Flow: TypeAlias = Generator[list[Job], list[ModeResult], T]
See: TypeAlias = Callable[[str, Job, ModeResult], None]
"""Told (name of the flow, job, result) as runs end; may be called from another thread."""


def perform(job: Job) -> ModeResult:
    """Run one job. The timeline comes back closed, without the clock of the run."""
    from dora_rl.observe.eventlog import FileLog

    log = FileLog.create(job.log) if job.log is not None else None
    result = run_mode(
        job.preset,
        job.mode,
        job.seed,
        job.rollout_devices,
        with_timeline=job.with_timeline,
        log=log,
    )
    if log is not None:
        log.close()
    return replace(result, timeline=Timeline(VirtualClock(), result.timeline.close()))


def conduct(flows: Mapping[str, Flow[T]], num_workers: int, see: See) -> dict[str, T]:
    """Drive every flow to its end and return what each returned."""
    executor: Executor = _Inline() if num_workers <= 1 else _processes(num_workers)
    try:
        found = _Conductor(flows, executor, see).run()
    except BrokenProcessPool as error:
        executor.shutdown(wait=False, cancel_futures=True)
        raise UserError("a simulating process was killed; try --jobs 1 (less memory)") from error
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)  # runs may go on for minutes
        raise
    # Every run has ended, so this takes a moment. Without it the interpreter may end while the
    # pool is closing its pipes, and prints a traceback ("Bad file descriptor").
    executor.shutdown(wait=True)
    return found


def _processes(num_workers: int) -> Executor:
    # A child dies at once when the user interrupts, without a traceback of its own.
    return ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_DFL),
    )


class _Inline(Executor):
    """Performs a job where it stands."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class _Conductor:
    def __init__(self, flows: Mapping[str, Flow[Any]], executor: Executor, see: See) -> None:
        self.flows = flows
        self.executor = executor
        self.see = see
        self.known: dict[Job, Future[ModeResult]] = {}
        self.asked: dict[str, list[Future[ModeResult]]] = {}
        self.returned: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        for name in self.flows:
            self._advance(name, None)
        while self.asked:
            for name, futures in list(self.asked.items()):
                if all(future.done() for future in futures):
                    self._advance(name, [future.result() for future in futures])
            pending = [f for futures in self.asked.values() for f in futures if not f.done()]
            if pending:
                wait(pending, return_when=FIRST_COMPLETED)
        return {name: self.returned[name] for name in self.flows}

    def _advance(self, name: str, answers: list[ModeResult] | None) -> None:
        flow = self.flows[name]
        try:
            jobs = next(flow) if answers is None else flow.send(answers)
        except StopIteration as stop:
            self.returned[name] = stop.value
            self.asked.pop(name, None)
            return
        self.asked[name] = [self._submit(name, job) for job in jobs]

    def _submit(self, name: str, job: Job) -> Future[ModeResult]:
        if job not in self.known:
            future = self.executor.submit(perform, job)
            future.add_done_callback(lambda done: self._tell(name, job, done))
            self.known[job] = future
        return self.known[job]

    def _tell(self, name: str, job: Job, done: Future[ModeResult]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.see(name, job, done.result())
