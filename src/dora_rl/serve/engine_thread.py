"""The engine in a thread of its own: calls in through an inbox, pieces out to sinks.

    event loop ── tell: begin, abort, load, … ──▶ inbox ──▶ engine.step ── pieces ──▶ event loop

Only this thread touches the engine. It decides nothing: who runs on which version, and when a
version comes or goes, is told to it. Invariant: every started request gives its sink exactly one
piece with a `finish`, unless it is aborted.

A step that raises is one request's fault until the contrary is known. Every request is taken out
and tried alone, from the tokens that its sink has had; who fails alone ends with an error, and the
others go on with the same draws. Where nothing at all can be generated any more the engine is
broken: all sinks get an error, and the thread ends.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from dora_rl.chat.service import Piece
from dora_rl.engine.engine import Engine
from dora_rl.engine.sequence import Output, Request, Status
from dora_rl.types import Finish, RequestId, SamplingParams, UserError, Version
from dora_rl.weights.store import WeightsError

Sink: TypeAlias = Callable[[Piece], None]  # called on the event loop
Pieces: TypeAlias = Sequence[tuple[Sink, Piece]]
Deliver: TypeAlias = Callable[[Pieces], None]
IDLE_S = 0.5
UNEXPLAINED_MAX = 3  # faults in a row that nobody repeats alone
TRIED_TOKENS = 2  # the first is drawn behind a prefill, the second behind a decoded row
PROBE = RequestId(0, 1)  # no client's: their groups count from 1


@dataclass(slots=True)
class Live:
    """A request that is being answered, and what its sink has had of it."""

    request: Request
    index: int
    sink: Sink
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])

    def so_far(self) -> Request:
        """The request that goes on from there, in an engine that knows nothing of it."""
        asked = self.request
        mask = asked.resume_mask or (1,) * len(asked.resume_ids)
        return replace(
            asked,
            resume_ids=(*asked.resume_ids, *self.token_ids),
            resume_logprobs=(*asked.resume_logprobs, *self.logprobs),
            resume_mask=(*mask, *(1 for _ in self.token_ids)),
        )


class EngineThread(threading.Thread):
    """`deliver` hands a step's pieces to the event loop, all at once."""

    def __init__(self, engine: Engine, deliver: Deliver, num_threads: int = 0) -> None:
        super().__init__(name="dora-rl engine", daemon=True)
        self.engine, self._deliver = engine, deliver
        self._num_threads = num_threads
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._live: dict[RequestId, Live] = {}
        self._num_unexplained = 0
        self._loads: deque[tuple[Future[None], Iterator[str]]] = deque()
        self._stopping = threading.Event()
        self.broken, self.reason = False, ""

    def tell(self, call: Callable[..., object], *arguments: Any) -> None:
        """From any thread: do this between two steps. `tell(thread.abort, request)`"""
        self._inbox.put(partial(call, *arguments))

    def stop(self) -> None:
        self.tell(self._stopping.set)
        if self.is_alive():
            self.join()

    def run(self) -> None:
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        device = self.engine.options.device
        if device.startswith("cuda"):  # a thread has a current device of its own
            torch.cuda.set_device(torch.device(device).index or 0)
        try:
            while not self._stopping.is_set():
                self._one_round()
        except Exception as error:  # whatever broke the engine, every waiting client must hear it
            self.reason = f"{type(error).__name__}: {error}"
            self.broken = True
            self._fail_all()
            raise

    def _one_round(self) -> None:
        """Do what lies in the inbox, load one layer, make one step."""
        busy = self.engine.has_work() or bool(self._loads)
        with suppress(queue.Empty):
            while not self._stopping.is_set():
                call = self._inbox.get(block=not busy, timeout=None if busy else IDLE_S)
                self._guarded(call)
                busy = True
        if self._loads:
            self._load_some()
        if self.engine.has_work():
            self._guarded(self._step)
            notes, self.engine.notes = self.engine.notes, []
            for line in notes:
                print(line, file=sys.stderr, flush=True)

    def _step(self) -> None:
        self._hand_out(self.engine.step())

    # -- faults ----------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever it is, it may be one request's alone
            fault: Exception | None = error
        else:
            fault = None
        if fault is not None:
            self._isolate(fault)

    def _isolate(self, fault: Exception) -> None:
        """Find out whose fault it was. Raises it where it was the engine's."""
        self.engine.start_over()
        passed: list[Live] = []
        for one in list(self._live.values()):
            reason = self._fails(one.so_far())
            if not reason:
                passed.append(one)
                continue
            print(f"a request failed and was ended: {reason}", file=sys.stderr, flush=True)
            self._fail(one, f"this request failed in the engine ({reason.partition(':')[0]})")
        self._num_unexplained += len(passed) == len(self._live)
        if self._num_unexplained > UNEXPLAINED_MAX or (not passed and self._fails(self._probe())):
            raise fault
        for one in passed:
            self.engine.submit(one.so_far())

    def _fails(self, request: Request) -> str:
        """Try a request alone: a prefill of what it has, then a decode. Returns what was wrong."""
        num_tokens = 0
        try:
            self.engine.submit(request)
            while self.engine.has_work() and num_tokens < TRIED_TOKENS:
                num_tokens += sum(len(output.token_ids) for output in self.engine.step())
            self.engine.abort(request.id)
            self.engine.outputs.clear()
        except Exception as error:  # noqa: BLE001 - the request is ended with it
            reason = f"{type(error).__name__}: {error}"
        else:
            return ""
        self.engine.start_over()
        return reason

    def _probe(self) -> Request:
        params = SamplingParams(tokens_max=1, temperature=0)
        return Request(PROBE, max(self.engine.versions(), default=-1), (0,), params)

    def _fail(self, one: Live, error: str) -> None:
        self._live.pop(one.request.id, None)
        self._deliver([(one.sink, Piece(one.index, finish=Finish.ERROR, error=error))])

    # -- told, and done in this thread ------------------------------------------------------------

    def begin(
        self, request: Request, index: int, sink: Sink, new_ids: tuple[int, ...] | None = None
    ) -> None:
        """Generate. `new_ids` are set for a next turn: where the session's KV is still here, only
        they are prefilled; otherwise `request` brings everything."""
        self._live[request.id] = Live(request, index, sink)
        kept = self.engine.scheduler.find(request.id)
        if new_ids is not None and kept is not None and kept.status is Status.IDLE:
            self.engine.extend(request.id, new_ids, request.params)
            return
        if kept is not None:
            self.engine.abort(request.id)
        self.engine.submit(request)

    def abort(self, request: RequestId) -> None:
        self._live.pop(request, None)
        self.engine.abort(request)

    def load(self, version: Version, source: Any, done: Future[None]) -> None:
        self._loads.append((done, self.engine.load_layers(version, source)))

    # -- a step ----------------------------------------------------------------------------------

    def _load_some(self) -> None:
        """One layer, so that other versions go on decoding."""
        done, layers = self._loads[0]
        try:
            next(layers)
        except StopIteration:
            self._loads.popleft()
            done.set_result(None)
        except (UserError, WeightsError, OSError) as error:
            self._loads.popleft()
            done.set_exception(error)

    def _hand_out(self, outputs: Sequence[Output]) -> None:
        pieces: list[tuple[Sink, Piece]] = []
        for output in outputs:
            one = self._live.get(output.id)
            if one is None:
                continue
            finish, error = None, ""
            if output.trajectory is not None:
                finish, error = output.trajectory.finish, output.trajectory.error
                del self._live[output.id]
                self._num_unexplained = 0
            one.token_ids += output.token_ids
            one.logprobs += output.logprobs
            new = (output.token_ids, output.logprobs, output.top_logprobs)
            pieces.append((one.sink, Piece(one.index, *new, finish, error)))
        if pieces:
            self._deliver(pieces)

    def _fail_all(self) -> None:
        failed = [
            (one.sink, Piece(one.index, finish=Finish.ERROR, error="the engine failed"))
            for one in self._live.values()
        ]
        self._live.clear()
        for done, _ in self._loads:
            done.set_exception(UserError("the engine failed"))
        self._deliver(failed)
