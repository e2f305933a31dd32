"""The engine in a thread of its own: commands in through an inbox, pieces out to sinks.

    event loop ── Start, Abort, Load, Retire ──▶ inbox ──▶ engine.step ── pieces ──▶ event loop

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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Start:
    """Generate. `new_ids` are set for a next turn: where the session's KV is still here, only they
    are prefilled; otherwise `request` brings everything."""

    request: Request
    index: int
    sink: Sink
    new_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    request: RequestId


@dataclass(frozen=True, slots=True)
class Load:
    version: Version
    source: Any
    done: Future[None]


@dataclass(frozen=True, slots=True)
class Retire:
    version: Version


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command: TypeAlias = Start | Abort | Load | Retire | Stop


class EngineThread(threading.Thread):
    """`deliver` hands a step's pieces to the event loop, all at once."""

    def __init__(self, engine: Engine, deliver: Deliver, num_threads: int = 0) -> None:
        super().__init__(name="dora-rl engine", daemon=True)
        self.engine, self._deliver = engine, deliver
        self._num_threads = num_threads
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._sinks: dict[RequestId, tuple[int, Sink]] = {}
        self._loads: deque[tuple[Load, Iterator[str]]] = deque()
        self._broken = threading.Event()
        self.reason = ""  # of a break

    def tell(self, command: Command) -> None:
        self._inbox.put(command)

    @property
    def broken(self) -> bool:
        return self._broken.is_set()

    def stop(self) -> None:
        self.tell(Stop())
        if self.is_alive():
            self.join()

    def run(self) -> None:
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        device = self.engine.options.device
        if device.startswith("cuda"):  # a thread has a current device of its own
            torch.cuda.set_device(torch.device(device).index or 0)
        try:
            while self._one_round():
                pass
        except Exception as error:  # whatever broke the engine, every waiting client must hear it
            self.reason = f"{type(error).__name__}: {error}"
            self._broken.set()
            self._fail_all()
            raise

    def _one_round(self) -> bool:
        """Read the inbox, load one layer, make one step. False when told to stop."""
        busy = self.engine.has_work() or bool(self._loads)
        while (command := self._next(wait=not busy)) is not None:
            if isinstance(command, Stop):
                return False
            self._perform(command)
            busy = True
        if self._loads:
            self._load_some()
        if self.engine.has_work():
            self._hand_out(self.engine.step())
            notes, self.engine.notes = self.engine.notes, []
            for line in notes:
                print(line, file=sys.stderr, flush=True)
        return True

    def _next(self, wait: bool) -> Command | None:
        try:
            return self._inbox.get(block=wait, timeout=IDLE_S if wait else None)
        except queue.Empty:
            return None

    def _perform(self, command: Command) -> None:
        match command:
            case Start():
                self._start(command)
            case Abort():
                self._sinks.pop(command.request, None)
                self.engine.abort(command.request)
            case Load():
                layers = self.engine.load_layers(command.version, command.source)
                self._loads.append((command, layers))
            case Retire():
                self.engine.retire(command.version)
            case Stop():
                raise AssertionError("told to stop in the middle of a command")

    def _start(self, command: Start) -> None:
        request = command.request
        self._sinks[request.id] = command.index, command.sink
        kept = self.engine.scheduler.find(request.id)
        if command.new_ids is not None and kept is not None and kept.status is Status.IDLE:
            self.engine.extend(request.id, command.new_ids, request.params)
            return
        if kept is not None:
            self.engine.abort(request.id)
        self.engine.submit(request)

    def _load_some(self) -> None:
        """One layer, so that other versions go on decoding."""
        command, layers = self._loads[0]
        try:
            next(layers)
            return
        except StopIteration:
            self._loads.popleft()
            command.done.set_result(None)
        except (UserError, WeightsError, OSError) as error:
            self._loads.popleft()
            command.done.set_exception(error)

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
        for command, _ in self._loads:
            command.done.set_exception(UserError("the engine failed"))
        self._deliver(failed)
