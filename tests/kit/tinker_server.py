"""A real `serve --tinker` over the tiny model, in a thread, and a client of it without the SDK."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from dora_rl.engine.options import EngineOptions
from dora_rl.tinker import SDK_VERSION, wire
from dora_rl.tinker.server import TinkerOptions, TinkerServer
from dora_rl.tinker.service import Limits, TinkerService
from tests.kit.places import MODEL

ENGINE = EngineOptions(
    kv_bytes_max=16 << 20,
    seqs_max=32,
    step_tokens_max=256,
    versions_max=3,
    lora_rank=8,
    lora_head=True,
)
LIMITS = Limits(names=("tiny", str(MODEL)), tokenizer=str(MODEL), rank_max=8)
KEY = "tml-first-key"
WAIT_S = 60.0


@dataclass
class Served:
    server: TinkerServer
    service: TinkerService

    def client(self, key: str = KEY) -> Raw:
        return Raw(self.server.url, key)


@contextmanager
def tinker_server(
    directory: Path,
    model: Path = MODEL,
    limits: Limits = LIMITS,
    engine: EngineOptions = ENGINE,
    **options: Any,
) -> Iterator[Served]:
    settings: dict[str, Any] = {"port": 0, "num_threads": 1, "grace_s": 1.0} | options
    server = TinkerServer(TinkerOptions(directory, limits, engine, **settings), model)
    ready, services, failed = threading.Event(), list[TinkerService](), list[BaseException]()

    def on_ready(service: TinkerService) -> None:
        services.append(service)
        ready.set()

    def run() -> None:
        try:
            asyncio.run(server.run(on_ready))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(WAIT_S), "the server did not start"
        if failed:
            raise failed[0]
        yield Served(server, services[0])
    finally:
        server.stop()
        server.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the server did not end"


class Refused(Exception):
    """An answer that is an error: of the request, or of its promise."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(f"{status}: {line}")
        self.status, self.line = status, line


class Raw:
    """Sends what the SDK sends."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self.http = httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=WAIT_S)
        self.session = ""

    def post(self, path: str, body: Mapping[str, Any] | bytes) -> dict[str, Any]:
        return self.send(path, body).json()

    def send(self, path: str, body: Mapping[str, Any] | bytes) -> httpx.Response:
        how: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            how = {"content": body, "headers": {"Content-Type": "application/x-protobuf"}}
        response = self.http.post(f"/api/v1/{path}", **how)
        if response.status_code != 200:
            raise Refused(response.status_code, response.json()["error"]["message"])
        return response

    def fetch(self, request_id: str) -> httpx.Response:
        """The answer of a promise, however often one must ask."""
        while True:
            body = {"request_id": request_id, "allow_metadata_only": True}
            response = self.http.post("/api/v1/retrieve_future", json=body)
            if response.status_code == 408:
                continue
            if "json" in response.headers["content-type"] and "error" in response.json():
                raise Refused(response.status_code, response.json()["error"])
            return response

    def open(self) -> str:
        self.post("client/config", {"sdk_version": SDK_VERSION})
        body = {"tags": [], "user_metadata": {}, "sdk_version": SDK_VERSION}
        self.session = self.post("create_session", body)["session_id"]
        return self.session

    def model(self, number: int = 0, **lora: Any) -> RawModel:
        body = {"session_id": self.session or self.open(), "model_seq_id": number}
        body |= {"base_model": "tiny", "lora_config": {"rank": 4, "seed": 3} | lora}
        made = self.post("create_model", body)
        return RawModel(self, self.fetch(made["request_id"]).json()["model_id"])

    def loaded(self, number: int, path: str, optimizer: bool = True) -> RawModel:
        body = {"session_id": self.session or self.open(), "model_seq_id": number}
        made = self.post("load_weights", body | {"path": path, "optimizer": optimizer})
        return RawModel(self, self.fetch(made["request_id"]).json()["model_id"])

    def sampler(self, number: int, path: str | None = None) -> RawSampler:
        body = {"session_id": self.session or self.open(), "sampling_session_seq_id": number}
        body |= {"base_model": "tiny"} if path is None else {"model_path": path}
        made = self.post("create_sampling_session", body)
        return RawSampler(self, made["sampling_session_id"])


class RawModel:
    """A training client; each call waits for its answer."""

    def __init__(self, raw: Raw, model_id: str) -> None:
        self.raw, self.id, self.seq = raw, model_id, 0

    def number(self) -> int:
        self.seq += 1
        return self.seq

    def begin(self, route: str, /, **body: Any) -> str:
        given = {"model_id": self.id, "seq_id": self.number()} | body
        return self.raw.post(route, given)["request_id"]

    def do(self, route: str, /, **body: Any) -> dict[str, Any]:
        return self.raw.fetch(self.begin(route, **body)).json()

    def begin_pass(self, data: Sequence[bytes], loss: str, **how: Any) -> str:
        body = pass_body(self.id, self.number(), data, loss, **how)
        return self.raw.post("forward_backward", body)["request_id"]

    def run(self, data: Sequence[bytes], loss: str = "cross_entropy", **how: Any) -> Outputs:
        return read_outputs(self.raw.fetch(self.begin_pass(data, loss, **how)).content)

    def step(self, lr: float = 3e-3, **adam: Any) -> float:
        found = self.do("optim_step", adam_params={"learning_rate": lr} | adam)
        return found["metrics"]["grad_norm"]

    def snapshot(self, number: int) -> RawSampler:
        found = self.do("save_weights_for_sampler", sampling_session_seq_id=number)
        return RawSampler(self.raw, found["sampling_session_id"])


class RawSampler:
    def __init__(self, raw: Raw, sampler_id: str) -> None:
        self.raw, self.id, self.seq = raw, sampler_id, -1

    def begin(self, prompt: Sequence[int], num_samples: int = 1, **body: Any) -> str:
        self.seq += 1
        params = body.pop("params", {})
        given = {"sampling_session_id": self.id, "seq_id": self.seq, "num_samples": num_samples}
        given |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [*prompt]}]}}
        given |= {"sampling_params": {"max_tokens": 4, "temperature": 1.0} | params} | body
        return self.raw.post("asample", given)["request_id"]

    def sample(self, prompt: Sequence[int], num_samples: int = 1, **body: Any) -> Samples:
        return read_samples(self.raw.fetch(self.begin(prompt, num_samples, **body)).content)

    def score(self, prompt: Sequence[int]) -> list[float]:
        found = self.sample(prompt, prompt_logprobs=True, params={"max_tokens": 1})
        assert found.prompt is not None
        return found.prompt


# -- protocol buffers, the other way round ---------------------------------------------------------


def datum_body(token_ids: Sequence[int], **inputs: Any) -> bytes:
    """Lists of floats are float32, lists of whole numbers int64, as the SDK has them."""
    tokens = wire.put_bytes(1, np.asarray(token_ids, np.int32).tobytes())
    out = wire.put_bytes(1, wire.put_bytes(1, tokens))
    for name, values in inputs.items():
        array = np.asarray(values)
        kind = 2 if array.dtype.kind == "i" else 1
        array = array.astype(np.int64 if kind == 2 else np.float32)
        tensor = wire.put_bytes(1, array.tobytes()) + wire.put_whole(3, kind)
        tensor += wire.put_wholes(4, array.shape)
        out += wire.put_entry(2, name, wire.put_bytes(2, tensor))
    return out


def pass_body(
    model_id: str,
    seq: int,
    data: Sequence[bytes],
    loss: str,
    config: Mapping[str, float] | None = None,
    forward_only: bool = False,
) -> bytes:
    out = wire.put_text(1, model_id) + wire.put_whole(2, seq)
    out += b"".join(wire.put_bytes(3, datum) for datum in data) + wire.put_text(4, loss)
    for name, value in (config or {}).items():
        number = wire.put_bytes(2, wire.put_double(1, value))
        out += wire.put_entry(7, name, number)
    return out + (wire.put_whole(6, 1) if forward_only else b"")


@dataclass
class Outputs:
    loss: float
    logprobs: list[list[float]]


def read_outputs(data: bytes) -> Outputs:
    loss, logprobs = 0.0, list[list[float]]()
    for one in wire.fields(data):
        if one.number == 2:
            parts = {part.number: part for part in wire.fields(one.bytes())}
            name, value = wire.entry(parts[2].bytes())
            assert name == "logprobs" and value is not None
            batched = {part.number: part for part in wire.fields(value.bytes())}
            flat = np.frombuffer(batched[1].bytes(), np.float32)
            ends = np.frombuffer(batched[2].bytes(), np.int64) // 4
            logprobs += [flat[a:b].tolist() for a, b in pairwise(ends)]
        elif one.number == 3:
            name, value = wire.entry(one.bytes())
            assert name == "loss:sum" and value is not None
            loss = value.double()
    return Outputs(loss, logprobs)


@dataclass
class Samples:
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    stopped: list[bool]
    prompt: list[float] | None


def read_samples(data: bytes) -> Samples:
    found = Samples([], [], [], None)
    for one in wire.fields(data):
        if one.number == 1:
            parts = {part.number: part for part in wire.fields(one.bytes())}
            found.stopped.append(parts[1].whole() == 0)
            found.token_ids.append(np.frombuffer(parts[2].bytes(), np.int32).tolist())
            found.logprobs.append(np.frombuffer(parts[3].bytes(), np.float32).tolist())
        elif one.number == 2:
            found.prompt = np.frombuffer(one.bytes(), np.float32).tolist()
    return found
