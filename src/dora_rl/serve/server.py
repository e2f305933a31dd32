"""The server as a whole: engine thread, event loop, HTTP, and the watch over newer versions.

Never decides what to generate. Invariant: it listens only once its first version is loaded, and
when it ends, running answers have had their grace and the engine's thread is gone.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dora_rl.chat.access import Access
from dora_rl.chat.app import make_app
from dora_rl.chat.conversation import ChatTemplate
from dora_rl.chat.http import BACKLOG, Bodies, HttpServer, http_server, tcp_socket
from dora_rl.chat.requests import ApiError
from dora_rl.engine.engine import Engine
from dora_rl.io.connection import is_loopback
from dora_rl.model.directory import read_spec
from dora_rl.model.tokenizer import Tokenizer
from dora_rl.serve.engine_thread import EngineThread, Pieces
from dora_rl.serve.service import EngineService, ServeOptions
from dora_rl.serve.texts import TextOptions, TextProcesses
from dora_rl.types import UserError
from dora_rl.weights.run_models import FoundModel, newer_model
from dora_rl.weights.store import WeightsError

# A text with more characters than so many for each token of the context is not tokenised at all.
# Ordinary text has 3 to 5, runs of blanks and lines at most a few dozen.
CHARS_PER_TOKEN_MAX = 64


class ModelServer:
    """`await run()` serves until `stop` is called, from any thread."""

    def __init__(
        self,
        options: ServeOptions,
        model: FoundModel,
        tokenizer: Tokenizer,
        say: Callable[[str], None] = print,
    ) -> None:
        self._options, self._model, self._say = options, model, say
        self._template = ChatTemplate(tokenizer, options.chat_template)
        self._socket = bind(options.host, options.port)
        self.port = int(self._socket.getsockname()[1])
        self._bodies = Bodies(options.http)
        self._http: HttpServer | None = None
        self._complaint = ""  # what was said of idle sessions last
        self._skipped = -1  # a version that could not be loaded

    @property
    def url(self) -> str:
        host = self._options.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"

    @property
    def num_connections(self) -> int:
        return len(self._http.server_state.connections) if self._http is not None else 0

    @property
    def num_body_bytes(self) -> int:
        """Of bodies that are being read."""
        return self._bodies.num_bytes

    def stop(self) -> None:
        """End gracefully; a second time: at once."""
        if self._http is not None:
            self._http.force_exit = self._http.should_exit
            self._http.should_exit = True

    async def run(self, ready: Callable[[EngineService], None] | None = None) -> None:
        loop = asyncio.get_running_loop()
        engine = Engine(
            read_spec(self._model.directory), self._options.engine, self._template.tokenizer.decode
        )

        def hand_out(pieces: Pieces) -> None:
            for sink, piece in pieces:
                sink(piece)

        def deliver(pieces: Pieces) -> None:
            loop.call_soon_threadsafe(hand_out, pieces)

        thread = EngineThread(engine, deliver, self._options.num_threads)
        thread.start()
        texts = self._texts(engine.context_max)
        try:
            await texts.start()
            service = EngineService(self._options, self._template, texts, thread)
            await service.load(self._model.version, self._model.source)
            await self._serve(service, ready)
        finally:
            self._socket.close()
            await texts.close()
            await asyncio.to_thread(thread.stop)
        if thread.broken:
            raise UserError(f"the engine failed: {thread.reason}")

    async def _serve(
        self, service: EngineService, ready: Callable[[EngineService], None] | None
    ) -> None:
        options = self._options
        hosts = tuple(map(str.lower, options.allowed_hosts))
        access = Access(options.api_keys, None, hosts, is_loopback(options.host))
        app = make_app(service, access, self._bodies)
        self._http = http_server(app, options.http, options.grace_s)
        keeper = asyncio.create_task(self._keep(service))
        self._socket.listen(BACKLOG)  # from here on clients may come
        if ready is not None:
            ready(service)
        try:
            await self._http.serve(sockets=[self._socket])
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    def _texts(self, context_max: int) -> TextProcesses:
        options = self._options
        to_process = TextOptions(
            model=str(self._model.directory),
            chat_template=options.chat_template,
            client_templates=options.client_templates,
            chars_max=context_max * CHARS_PER_TOKEN_MAX,
            text_s_max=options.text_s_max,
        )
        return TextProcesses(to_process, options.texts_waiting_max)

    async def _keep(self, service: EngineService) -> None:
        """Newer versions in, unused ones and idle sessions out, until the server ends."""
        while True:
            await asyncio.sleep(self._options.watch_s)
            if not service.healthy():
                self.stop()
                return
            await self._end_idle_sessions(service)
            service.retire_unused()
            if self._options.watch is not None and service.has_room():
                await self._look_for_newer(service, self._options.watch)

    async def _end_idle_sessions(self, service: EngineService) -> None:
        try:
            await service.end_idle_sessions()
        except ApiError as error:
            if error.message != self._complaint:
                self._say(f"idle sessions stay: {error.message}")
            self._complaint = error.message

    async def _look_for_newer(self, service: EngineService, run: Path) -> None:
        than = max(service.live, self._skipped)
        try:
            found = await asyncio.to_thread(newer_model, run, than)
        except (WeightsError, UserError, OSError) as error:
            self._say(f"cannot read the versions of {run}: {error}")
            return
        if found is None:
            return
        before = service.live
        try:
            await service.load(found.version, found.source)
        except (WeightsError, UserError, OSError) as error:
            self._skipped = found.version
            self._say(f"version {found.version} cannot be loaded: {error}")
            return
        stay = service.num_sessions_on(before)
        rest = f"; {stay} sessions stay on version {before}" if stay else ""
        self._say(f"version {found.version} is live{rest}")


class Runs(Protocol):
    """A server; `ready` is called once it can be asked."""

    async def run(self, ready: Callable[[Any], None]) -> None: ...
    def stop(self) -> None: ...


def serve_until_signal(server: Runs, ready: Callable[[Any], None]) -> None:
    """Run until SIGINT or SIGTERM."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.stop)
        await server.run(ready)

    asyncio.run(main())


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = tcp_socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose --port"
        ) from None
    return sock
