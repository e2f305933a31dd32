"""A real server over the tiny model, in a thread, and real clients of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.serve.server import ModelServer
from dora_rl.serve.service import EngineService, ServeOptions
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import RequestId, SamplingParams, Trajectory
from dora_rl.weights.run_models import find_model, is_run
from tests.kit.places import MODEL

ENGINE = EngineOptions(kv_bytes_max=16 << 20, seqs_max=64, step_tokens_max=256)
WAIT_S = 60.0


@dataclass
class Serving:
    """One running server."""

    server: ModelServer
    service: EngineService
    said: list[str]

    def client(self, **options: Any) -> openai.OpenAI:
        settings = {"base_url": self.server.url, "api_key": "none", "max_retries": 0}
        return openai.OpenAI(**(settings | options))

    def num_connections(self) -> int:
        return self.server.num_connections

    @property
    def engine(self) -> Engine:
        """To look at, while nothing runs."""
        return self.service.engine.engine


@contextmanager
def serving(path: Path = MODEL, **options: Any) -> Iterator[Serving]:
    torch.set_num_threads(1)
    found = find_model(path)
    settings: dict[str, Any] = {"name": "tiny", "port": 0, "num_threads": 1, "watch_s": 0.05}
    settings |= {"engine": ENGINE, "watch": path if is_run(path) else None}
    said: list[str] = []
    tokenizer = open_tokenizer(found.directory, False)
    server = ModelServer(ServeOptions(**(settings | options)), found, tokenizer, said.append)
    ready, services = threading.Event(), []

    def on_ready(service: EngineService) -> None:
        services.append(service)
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(server.run(on_ready)))
    thread.start()
    try:
        assert ready.wait(WAIT_S), "the server did not start"
        yield Serving(server, services[0], said)
    finally:
        server.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server did not end"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.02)


def alone(prompt: tuple[int, ...], seed: int = 0, source: Any = MODEL, **params: Any) -> Trajectory:
    """The same request to an engine without a server."""
    engine = Engine(read_spec(MODEL), ENGINE, open_tokenizer(MODEL, False).decode)
    engine.load(0, source)
    engine.submit(Request(RequestId(0, 0), 0, prompt, SamplingParams(**params), seed))
    while engine.has_work():
        for output in engine.step():
            if output.trajectory is not None:
                return output.trajectory
    raise AssertionError("the engine gave nothing")
