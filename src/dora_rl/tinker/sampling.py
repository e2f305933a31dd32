"""Samples for clients: whose request runs next, on which snapshot, and what comes of it.

Lives on the event loop; the engine has a thread of its own. A request becomes as many of the
engine as it has samples, and one more where the prompt is to be scored. Invariants: a request runs
on the one version that its client has, from beginning to end; whatever happens it is answered once,
unless its client is gone, and then nothing of it stays in the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dora_rl.chat.service import Piece
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.serve.engine_thread import EngineThread, Pieces
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.tinker.book import Answer
from dora_rl.tinker.messages import Asked, Best, Sample, write_samples
from dora_rl.tinker.residents import Load, Residents
from dora_rl.tinker.turns import Turns
from dora_rl.types import Finish, RequestId, SamplingParams, Version
from dora_rl.weights.store import DiskWeightStore


class Settle(Protocol):
    """Called once, with an answer, or with what was wrong and whether that was the client's."""

    def __call__(self, answer: Answer | None, error: str = "", mine: bool = True) -> None: ...


@dataclass(slots=True, eq=False)
class Job:
    """One request, and what the engine has given of it so far."""

    client: str
    version: Version
    asked: Asked
    settle: Settle
    samples: list[Sample] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)
    prompt_top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    running: dict[int, RequestId] = field(default_factory=dict)  # by its place
    ended: bool = False

    @property
    def scores_prompt(self) -> bool:
        """A prompt of one token has nothing to score."""
        return self.asked.scores_prompt and len(self.asked.prompt) > 1

    def take(self, piece: Piece) -> None:
        if piece.choice == self.asked.num_samples:
            self.prompt += piece.logprobs
            self.prompt_top += piece.top_logprobs
        else:
            one = self.samples[piece.choice]
            one.token_ids += piece.token_ids
            one.logprobs += piece.logprobs
            one.top += piece.top_logprobs
            one.stopped = piece.finish is Finish.STOP
        if piece.finish is not None:
            del self.running[piece.choice]

    def answer(self) -> Answer:
        asked = self.asked
        prompt: list[float] | None = None
        top: Best | None = None
        if asked.scores_prompt:  # nothing comes before the first token, so nothing predicts it
            unknown = len(asked.prompt) - min(asked.last, len(self.prompt))
            prompt = [math.nan] * unknown + self.prompt[unknown - 1 :]
            if asked.top_prompt:
                top = [()] * unknown + self.prompt_top[unknown - 1 :]
        return Answer(write_samples(self.samples, asked.params.logprobs_top_n, prompt, top), True)


def start_engine(model: Path, options: EngineOptions, num_threads: int) -> EngineThread:
    """On the base in a model directory; what it gives comes to this event loop."""
    loop = asyncio.get_running_loop()
    engine = Engine(read_spec(model), options, open_tokenizer(model, False).decode)
    engine.load_base(model)

    def hand_out(pieces: Pieces) -> None:
        for sink, piece in pieces:
            sink(piece)

    def deliver(pieces: Pieces) -> None:
        loop.call_soon_threadsafe(hand_out, pieces)

    thread = EngineThread(engine, deliver, num_threads)
    thread.start()
    return thread


class Sampling:
    """`ask` at any time; `running_max` responses are generated at once, a request more at most."""

    def __init__(self, thread: EngineThread, store: DiskWeightStore, running_max: int) -> None:
        self._thread, self._store, self._running_max = thread, store, running_max
        self._residents = Residents(thread.engine.options.versions_max)
        self._turns: Turns[Job] = Turns()
        self._jobs: list[Job] = []
        self._numbers: dict[str, itertools.count[int]] = {}
        self._unusable: dict[Version, str] = {}
        self._groups = itertools.count(1)
        self._loads: set[asyncio.Task[None]] = set()

    @property
    def context_max(self) -> int:
        return self._thread.engine.context_max

    def open(self, client: str) -> None:
        self._turns.open(client)
        self._numbers[client] = itertools.count(1)

    def close(self, client: str) -> None:
        """The client is gone, with whatever it has running."""
        for job in self._turns.close(client):
            job.ended = True
        for job in [job for job in self._jobs if job.client == client]:
            self._end(job)
        self._numbers.pop(client, None)
        self.pump()

    def ask(self, client: str, version: Version, asked: Asked, settle: Settle) -> Job:
        """A job, which `cancel` ends before its time."""
        job = Job(client, version, asked, settle)
        self._turns.add(client, next(self._numbers[client]), job, 0.0)
        self.pump()
        return job

    def cancel(self, job: Job) -> None:
        if job.ended:
            return
        if job in self._jobs:
            self._end(job)
        job.ended = True  # if it waits, it is dropped when its turn comes
        job.settle(None, "the client gave this request up")
        self.pump()

    def forget(self, version: Version) -> None:
        """No client has it any more."""
        self._unusable.pop(version, None)
        if self._residents.forget(version):
            self._thread.tell(self._thread.engine.retire, version)

    def pump(self) -> None:
        """Start what may run now."""
        while sum(len(job.running) for job in self._jobs) < self._running_max:
            job = self._turns.take(self._may_run)
            if job is None:
                return
            if job.version in self._unusable and not job.ended:
                job.ended = True
                job.settle(None, self._unusable[job.version])
            elif not job.ended:
                self._start(job)

    def _may_run(self, _: str, job: Job) -> bool:
        if job.ended or job.version in self._unusable:
            return True
        wanted = self._residents.want(job.version)
        if isinstance(wanted, Load):
            task = asyncio.ensure_future(self._load(wanted))
            self._loads.add(task)
            task.add_done_callback(self._loads.discard)
            return False
        return wanted

    async def _load(self, load: Load) -> None:
        thread, done = self._thread, Future[None]()
        if load.evict is not None:
            thread.tell(thread.engine.retire, load.evict)
        try:
            sealed = await asyncio.to_thread(self._store.open, load.version)
            thread.tell(thread.load, load.version, sealed, done)
            await asyncio.wrap_future(done)
        except Exception as error:  # noqa: BLE001 - told to whoever waits for it
            self._residents.failed(load.version)
            self._unusable[load.version] = f"this snapshot cannot be loaded: {error}"
        else:
            self._residents.loaded(load.version)
        self.pump()

    def _start(self, job: Job) -> None:
        asked, group = job.asked, next(self._groups)
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        self._jobs.append(job)
        job.samples = [Sample() for _ in range(asked.num_samples)]
        requests = [
            Request(
                RequestId(group, place),
                job.version,
                asked.prompt,
                asked.params,
                seed,
                stream=RequestId(0, place),  # a seed draws alike, whatever else was asked
            )
            for place in range(asked.num_samples)
        ]
        if job.scores_prompt:
            given = SamplingParams(
                tokens_max=len(asked.prompt) - 1,
                forced_ids=asked.prompt[1:],
                ignore_eos=True,
                logprobs_top_n=asked.top_prompt,
            )
            name = RequestId(group, asked.num_samples)
            requests.append(Request(name, job.version, asked.prompt[:1], given))
        job.running = {request.id.sample: request.id for request in requests}
        sink = self._sink(job)
        for place, request in enumerate(requests):
            self._thread.tell(self._thread.begin, request, place, sink)

    def _sink(self, job: Job) -> Callable[[Piece], None]:
        def take(piece: Piece) -> None:
            if job.ended:
                return
            job.take(piece)
            failed = piece.finish in (Finish.REFUSED, Finish.ERROR)
            if failed or not job.running:
                self._end(job)
                if failed:
                    job.settle(None, piece.error, piece.finish is Finish.REFUSED)
                else:
                    job.settle(job.answer())
                self.pump()

        return take

    def _end(self, job: Job) -> None:
        job.ended = True
        self._jobs.remove(job)
        for request in job.running.values():
            self._thread.tell(self._thread.abort, request)
        self._residents.leave(job.version)
