"""Migration: a running request leaves one engine and goes on in another of the same version.

Two phases, as in the paper: metadata first (JSON), then the KV blocks, one chunk each. A chunk is a
tensor [layer, 2, kv head, token, head dim], or its bytes with the record of its tokens' experts
behind them (see `tensors.cache`); inside one process it may stay on the device, over a
wire it is its raw bytes (`chunk_bytes`, `chunk_from_bytes`), never pickled. The source keeps the
request, put aside, until `Export.done`; if the receiver refuses or dies, `Export.cancel` lets it go
on where it was. The receiver computes no token again. Both ends count the bytes they moved.

    export = export_request(a, request)          a: request is put aside, blocks held
    arrival = begin_import(b, export.meta)       b: version and shape checked, room taken
    for chunk in export.chunks(): arrival.write(chunk)
    arrival.commit(); export.done()              b: queued, decodes next; a: forgotten
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dora_rl.engine.journal import continuation, request_from_json, request_json
from dora_rl.engine.sequence import Sequence, Status
from dora_rl.types import RequestId, UserError
from dora_rl.user_code import require

if TYPE_CHECKING:
    from dora_rl.engine.engine import Engine

FORMAT = 1


def export_request(engine: Engine, request: RequestId) -> Export:
    """Put a request aside and describe it; raises if it is not here."""
    parked = engine.is_parked(request)
    return Export(engine, engine.put_aside(request), parked)


class Export:
    """The sending half."""

    has_kv = True

    def __init__(self, engine: Engine, seq: Sequence, parked: bool = False) -> None:
        self._engine, self._seq, self._parked = engine, seq, parked
        self.num_chunks = len(seq.blocks) or seq.num_host_blocks
        self.num_bytes = 0
        body = {
            "format": FORMAT,
            "request": request_json(continuation(seq)),
            "num_computed": seq.num_computed,
            "num_chunks": self.num_chunks,
            "shape": shape_of(engine),
        }
        self.meta = json.dumps(body, separators=(",", ":")).encode()

    def chunks(self) -> Iterator[Tensor]:
        """One block after the other, on the engine's device (on the host if it was spilled)."""
        cache = self._engine.runner.cache
        for index in range(self.num_chunks):
            here = self._seq.blocks[index : index + 1]
            chunk = cache.block(here[0]) if here else cache.host_block(self._seq.id, index)
            self.num_bytes += chunk.nbytes
            yield chunk

    def done(self) -> None:
        """The receiver has it: forget the request here."""
        self._engine.forget(self._seq.id)

    def cancel(self) -> None:
        """It stays as it was: parked, or queued again with its KV."""
        if not self._parked:
            self._engine.unpark(self._seq.id)


def begin_import(engine: Engine, meta: bytes) -> Import:
    """Check the metadata and take room; raises `UserError` if this engine cannot continue it."""
    body = json.loads(meta)
    if body.get("format") != FORMAT:
        raise UserError(f"migration format {body.get('format')}; this engine speaks {FORMAT}")
    request = request_from_json(body["request"])
    who = f"request {tuple(request.id)}"
    require(
        (
            request.version in engine.versions(),
            f"{who} is on version {request.version}; this engine holds {list(engine.versions())}",
        ),
        (
            body["shape"] == shape_of(engine),
            f"{who}: KV blocks of shape {body['shape']} do not fit an engine "
            f"of shape {shape_of(engine)}",
        ),
    )
    seq = engine.new_sequence(request)
    if reason := engine.refusal(seq):
        raise UserError(f"{who}: {reason}")
    return Import(engine, seq, body["num_computed"], body["num_chunks"])


class Import:
    """The receiving half: chunks go to device blocks if there is room, else to the host."""

    def __init__(self, engine: Engine, seq: Sequence, num_computed: int, num_chunks: int) -> None:
        self._engine, self._seq = engine, seq
        self._num_chunks, self._num_computed = num_chunks, num_computed
        self._host: list[Tensor] = []
        self.num_bytes = self._num_written = 0
        seq.status = Status.PARKED
        self._on_device = engine.scheduler.take_blocks(seq, num_chunks)
        if not self._on_device and not engine.scheduler.reserve_host(seq, num_chunks):
            raise UserError(
                f"request {tuple(seq.id)}: no room for {num_chunks} KV blocks on device or host"
            )

    def write(self, chunk: Tensor) -> None:
        assert self._num_written < self._num_chunks, "more chunks than announced"
        self.num_bytes += chunk.nbytes
        if self._on_device:
            self._engine.runner.cache.import_block(self._seq.blocks[self._num_written], chunk)
        else:
            self._host.append(chunk.cpu())
        self._num_written += 1

    def commit(self) -> None:
        """All chunks are here: the request queues up and decodes next, with nothing to prefill."""
        assert self._num_written == self._num_chunks, "chunks are missing"
        if self._host:
            self._engine.runner.cache.put_host(self._seq.id, self._host)
        self._seq.num_computed = self._num_computed
        self._engine.adopt(self._seq)

    def cancel(self) -> None:
        """The sender died half-way: give the room back."""
        self._engine.scheduler.remove(self._seq)


def move(source: Engine, target: Engine, request: RequestId) -> int:
    """Migrate inside one process; returns the bytes moved. On refusal the request stays."""
    export = export_request(source, request)
    try:
        arrival = begin_import(target, export.meta)
    except UserError:
        export.cancel()
        raise
    for chunk in export.chunks():
        arrival.write(chunk)
    arrival.commit()
    export.done()
    return arrival.num_bytes


def shape_of(engine: Engine) -> list[object]:
    """What two engines must agree on to exchange blocks."""
    spec, options = engine.spec, engine.options
    sizes = (spec.num_layers, spec.num_kv_heads, spec.head_dim, options.block_tokens)
    routing = ["routing"] if engine.runner.cache.routing is not None else []
    return [spec.family, *sizes, options.dtype, *routing]


def chunk_bytes(chunk: Tensor) -> memoryview:
    """The raw bytes of a chunk, for a wire. The view owns them."""
    host = torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=chunk.is_cuda)
    host.copy_(chunk.contiguous())
    return host.view(-1).view(torch.uint8).numpy().data


def chunk_from_bytes(engine: Engine, data: bytes | bytearray | memoryview) -> Tensor:
    """A chunk from its raw bytes; the length is checked."""
    num_bytes = engine.runner.cache.block_bytes
    if len(data) != num_bytes:
        raise UserError(f"a KV chunk has {len(data)} bytes, {num_bytes} were expected")
    chunk = engine.runner.cache.empty_chunk()
    chunk.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return chunk
