"""The engine in a thread of its own: calls in through an inbox, pieces out to sinks.

    event loop ── tell: begin, abort, load, … ──▶ inbox ──▶ engine.step ── pieces ──▶ event loop

Only this thread touches the engine. It decides nothing: who runs on which version, and when a
version comes or goes, is told to it. Invariant: every started request gives its sink exactly one
piece with a `finish`, unless it is aborted; if the engine breaks, that piece is an error.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch

from dora_rl.chat.service import Piece
from dora_rl.engine.engine import Engine
from dora_rl.engine.sequence import Output, Request, Status
from dora_rl.types import Finish, RequestId, UserError, Version
from dora_rl.weights.store import WeightsError

Sink: TypeAlias = Callable[[Piece], None]  # called on the event loop
Pieces: TypeAlias = Sequence[tuple[Sink, Piece]]
Deliver: TypeAlias = Callable[[Pieces], None]
IDLE_S = 0.5


class EngineThread(threading.Thread):
    """`deliver` hands a step's pieces to the event loop, all at once."""

    def __init__(self, engine: Engine, deliver: Deliver, num_threads: int = 0) -> None:
        super().__init__(name="dora-rl engine", daemon=True)
        self.engine, self._deliver = engine, deliver
        self._num_threads = num_threads
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._sinks: dict[RequestId, tuple[int, Sink]] = {}
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
                call()
                busy = True
        if self._loads:
            self._load_some()
        if self.engine.has_work():
            self._hand_out(self.engine.step())
            notes, self.engine.notes = self.engine.notes, []
            for line in notes:
                print(line, file=sys.stderr, flush=True)

    # -- told, and done in this thread ------------------------------------------------------------

    def begin(
        self, request: Request, index: int, sink: Sink, new_ids: tuple[int, ...] | None = None
    ) -> None:
        """Generate. `new_ids` are set for a next turn: where the session's KV is still here, only
        they are prefilled; otherwise `request` brings everything."""
        self._sinks[request.id] = index, sink
        kept = self.engine.scheduler.find(request.id)
        if new_ids is not None and kept is not None and kept.status is Status.IDLE:
            self.engine.extend(request.id, new_ids, request.params)
            return
        if kept is not None:
            self.engine.abort(request.id)
        self.engine.submit(request)

    def abort(self, request: RequestId) -> None:
        self._sinks.pop(request, None)
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
            entry = self._sinks.get(output.id)
            if entry is None:
                continue
            index, sink = entry
            finish, error = None, ""
            if output.trajectory is not None:
                finish, error = output.trajectory.finish, output.trajectory.error
                del self._sinks[output.id]
            new = (output.token_ids, output.logprobs, output.top_logprobs)
            pieces.append((sink, Piece(index, *new, finish, error)))
        if pieces:
            self._deliver(pieces)

    def _fail_all(self) -> None:
        failed = [
            (sink, Piece(index, finish=Finish.ERROR, error="the engine failed"))
            for index, sink in self._sinks.values()
        ]
        self._sinks.clear()
        for done, _ in self._loads:
            done.set_exception(UserError("the engine failed"))
        self._deliver(failed)
