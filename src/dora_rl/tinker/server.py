"""The server as a whole: engine thread, learner thread, event loop, HTTP.

Never decides anything. Invariant: it listens only once the base is loaded twice, for learning and
for sampling; when it ends, both threads are gone and the directory is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dora_rl.chat.access import Access
from dora_rl.chat.http import BACKLOG, Bodies, HttpLimits, HttpServer, http_server
from dora_rl.engine.options import EngineOptions
from dora_rl.io.connection import is_loopback
from dora_rl.serve.engine_thread import EngineThread
from dora_rl.serve.server import bind
from dora_rl.tinker.app import make_app
from dora_rl.tinker.sampling import Sampling, start_engine
from dora_rl.tinker.service import Limits, TinkerService
from dora_rl.tinker.states import BASE_VERSION, States
from dora_rl.tinker.trainee import Base, publish_base
from dora_rl.tinker.views import Views
from dora_rl.types import UserError
from dora_rl.weights.lora_base import base_checksum
from dora_rl.weights.store import WeightsError

KEEP_S = 1.0  # between two looks at idle sessions


@dataclass(frozen=True, slots=True)
class TinkerOptions:
    """`engine` has `lora_rank`, the largest that a client may ask for, and `versions_max`, the
    snapshots that are resident at once."""

    directory: Path
    limits: Limits
    engine: EngineOptions
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    grace_s: float = 10.0
    num_threads: int = 0
    http: HttpLimits = field(default_factory=HttpLimits)


class TinkerServer:
    """`await run()` serves until `stop` is called, from any thread."""

    def __init__(self, options: TinkerOptions, model: Path) -> None:
        self._options, self._model = options, model
        self._socket = bind(options.host, options.port)
        self.port = int(self._socket.getsockname()[1])
        self._http: HttpServer | None = None

    @property
    def url(self) -> str:
        host = self._options.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def stop(self) -> None:
        """End gracefully; a second time: at once."""
        if self._http is not None:
            self._http.force_exit = self._http.should_exit
            self._http.should_exit = True

    async def run(self, ready: Callable[[TinkerService], None] = lambda service: None) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self._socket.close)
            states = States(self._options.directory, base_checksum(self._model))
            closing.callback(states.close)
            await self._with(states, ready)

    async def _with(self, states: States, ready: Callable[[TinkerService], None]) -> None:
        options = self._options
        engine_options = options.engine
        base = Base(self._model, engine_options.device, engine_options.dtype)
        if BASE_VERSION not in states.store.versions():
            publish_base(base, states.store, BASE_VERSION, states.base)
        thread = start_engine(self._model, engine_options, options.num_threads)
        sampling = Sampling(thread, states.store, engine_options.seqs_max)
        service = TinkerService(base, states, sampling, options.limits, options.num_threads)
        try:
            await self._serve(service, states, thread, ready)
        finally:
            await asyncio.to_thread(thread.stop)
            await asyncio.to_thread(service.training.stop)
        if thread.broken:
            raise UserError(f"the engine failed: {thread.reason}")

    async def _serve(
        self,
        service: TinkerService,
        states: States,
        thread: EngineThread,
        ready: Callable[[TinkerService], None],
    ) -> None:
        options = self._options
        hosts = tuple(map(str.lower, options.allowed_hosts))
        access = Access(options.api_keys, None, hosts, is_loopback(options.host))
        views = Views(states, options.limits, thread.engine.context_max)
        app = make_app(service, views, access, Bodies(options.http))
        self._http = http_server(app, options.http, options.grace_s)
        tasks = [
            asyncio.create_task(service.training.run()),
            asyncio.create_task(self._keep(service, thread)),
        ]
        for task in tasks:
            task.add_done_callback(lambda task: self.stop())  # without it nobody would be answered
        self._socket.listen(BACKLOG)
        ready(service)
        try:
            await self._http.serve(sockets=[self._socket])
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _keep(self, service: TinkerService, thread: EngineThread) -> None:
        complaint = ""
        while True:
            await asyncio.sleep(KEEP_S)
            if thread.broken:
                self.stop()
                return
            try:
                service.end_idle()
            except (UserError, WeightsError, OSError) as error:
                line = " ".join(str(error).split())
                if line != complaint:
                    print(f"dora-rl serve: {line}", file=sys.stderr, flush=True)
                complaint = line
