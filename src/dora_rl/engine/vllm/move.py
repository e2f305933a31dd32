"""A request on its way from one vLLM instance to another: its tokens, and its KV where that moves.

Knows nothing of vLLM itself. Invariant: the sender keeps the request, put aside, until `done`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dora_rl.engine.journal import continuation, request_json
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.types import UserError

if TYPE_CHECKING:
    from dora_rl.engine.vllm.engine import VllmEngine


@dataclass(frozen=True, slots=True)
class RequestKv:
    """The KV of a request's first `num_tokens` tokens: its blocks, layer after layer."""

    num_tokens: int
    layers: tuple[Tensor, ...]  # uint8, each [blocks, bytes of a block]

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class VllmExport:
    """The sending half of a move; without KV the receiver prefills the request's tokens."""

    def __init__(
        self,
        engine: VllmEngine,
        seq: Seq,
        parked: bool,
        kv: RequestKv | None,
        layout: list[list[Any]],
    ) -> None:
        self._engine, self._seq, self._parked, self._kv = engine, seq, parked, kv
        self.has_kv = kv is not None
        self.num_bytes = kv.num_bytes if kv is not None else 0
        body = {"request": request_json(continuation(seq)), "layout": layout}
        if kv is not None:
            body |= {"num_tokens": kv.num_tokens, "num_blocks": kv.layers[0].shape[0]}
        self.meta = json.dumps(body, separators=(",", ":")).encode()

    def chunks(self) -> Iterator[Tensor]:
        """All blocks of a layer, layer after layer."""
        return iter(self._kv.layers if self._kv is not None else ())

    def done(self) -> None:
        self._engine.forget(self._seq.id)

    def cancel(self) -> None:
        if not self._parked:
            self._engine.unpark(self._seq.id)


def unpack_kv(body: dict[str, Any], data: memoryview) -> RequestKv:
    """The chunks of an export from their bytes, one after the other."""
    layers, begin, blocks = [], 0, int(body["num_blocks"])
    for _, dtype, shape, _ in body["layout"]:
        size = math.prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize
        part = data[begin : begin + blocks * size]
        if len(part) != blocks * size:
            raise UserError(f"{len(data)} bytes of KV came, more were announced")
        layers.append(torch.frombuffer(bytearray(part), dtype=torch.uint8).view(blocks, size))
        begin += blocks * size
    return RequestKv(int(body["num_tokens"]), tuple(layers))
