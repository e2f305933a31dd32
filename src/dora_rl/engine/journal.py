"""A token journal: what an instance generated, on disk every few tokens.

Append-only lines, `crc32 JSON`. A `state` line tells everything about a request, `tokens` lines add
to it, an `end` line closes it. Reading gives, for every request that had not ended, a `Request`
that continues it: same version, same random stream, next position. What was not yet flushed, is
torn or lies behind a damaged line is simply generated again, with the same tokens. Never read while
it is being written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dora_rl.engine.sequence import Request
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.io.append_log import AppendLog, checked, text_of, whole_lines
from dora_rl.io.codec import decode, dumps, encode, loads
from dora_rl.types import RequestId


class Sink(Protocol):
    """Where the lines go: a file here, or a connection to whoever keeps them."""

    def append(self, data: bytes, /) -> None: ...
    def replace(self, data: bytes, /) -> None:
        """All lines so far give way to these, at once."""
        ...

    def close(self) -> None: ...


class Journal:
    """Writes one journal. `every` is the number of steps between two flushes."""

    def __init__(
        self,
        path: str | Path | Sink,
        every: int = 16,
        durable: bool = True,
        bytes_max: int = 64 << 20,
    ) -> None:
        is_file = isinstance(path, str | Path)
        self._sink = AppendLog.of_lines(Path(path), synced=durable) if is_file else path
        self._every, self._bytes_max = every, bytes_max
        self._lines: list[bytes] = []
        self._tokens: dict[RequestId, tuple[list[int], list[float], list[float]]] = {}
        self._num_steps = self._num_bytes = 0

    def state(self, seq: Seq) -> None:
        """A request arrived, or changed in a way that tokens alone do not tell."""
        self._tokens.pop(seq.id, None)
        self._lines.append(_line("state", request_json(continuation(seq))))

    def tokens(
        self,
        request: RequestId,
        ids: Sequence[int],
        logprobs: Sequence[float],
        raw: Sequence[float],
    ) -> None:
        kept = self._tokens.setdefault(request, ([], [], []))
        kept[0].extend(ids)
        kept[1].extend(logprobs)
        kept[2].extend(raw)

    def end(self, request: RequestId) -> None:
        self._tokens.pop(request, None)
        self._lines.append(_line("end", {"id": list(request)}))

    def step(self, live: Iterable[Seq] = (), count: int = 1, *, idle: bool = False) -> None:
        """Called after `count` engine steps; flushes when it is time, compacts when it is large.

        It is always time where the engine is `idle`: the next step may be long in coming.
        """
        self._num_steps += count
        if idle or self._num_steps >= self._every:
            self._num_steps = 0
            self.flush()
            if self._num_bytes > self._bytes_max:
                self.compact(live)

    def flush(self) -> None:
        self._lines += [
            _line("tokens", {"id": list(request), "ids": ids, "logprobs": logprobs, "raw": raw})
            for request, (ids, logprobs, raw) in self._tokens.items()
        ]
        self._tokens.clear()
        if not self._lines:
            return
        data, self._lines = b"".join(self._lines), []
        self._sink.append(data)
        self._num_bytes += len(data)

    def compact(self, live: Iterable[Seq]) -> None:
        """Replace everything by the present state of the live requests."""
        data = b"".join(_line("state", request_json(continuation(seq))) for seq in live)
        self._sink.replace(data)
        self._num_bytes = len(data)

    def close(self) -> None:
        self.flush()
        self._sink.close()


def read_journal(path: str | Path) -> list[Request]:
    """The requests that had not ended, each ready to be submitted to any engine of its version."""
    live: dict[RequestId, Request] = {}
    file = Path(path)
    for line in whole_lines(file.read_bytes()) if file.is_file() else ():
        if (text := text_of(line)) is None:
            break
        kind, body = loads(text)
        key = RequestId(*body["id"])
        if kind == "state":
            live[key] = request_from_json(body)
        elif kind == "end":
            live.pop(key, None)
        elif key in live:
            live[key] = _extended(live[key], body)
    return list(live.values())


def continuation(seq: Seq) -> Request:
    """A request that picks up where the sequence stands."""
    num_known = len(seq.logprobs)
    return replace(
        seq.request,
        version=seq.version,
        resume_ids=tuple(seq.tokens[seq.num_prompt : seq.num_prompt + num_known]),
        resume_logprobs=tuple(seq.logprobs),
        resume_raw_logprobs=tuple(seq.raw_logprobs),
        resume_mask=tuple(seq.loss_mask),
        resume_segments=tuple(seq.segments),
        response_max=seq.response_max,
        turns=seq.turns,
    )


def request_json(request: Request) -> dict[str, object]:
    return encode(Request, request)


def request_from_json(body: dict[str, Any]) -> Request:
    return decode(Request, body)


def saved_ids(body: Mapping[str, Any]) -> list[int]:
    """The response so far of a request that was written down, with all of its branches."""
    past = body.get("past")
    return [*(past["token_ids"] if past else ()), *body["resume_ids"]]


def _extended(request: Request, body: dict[str, Any]) -> Request:
    ids = tuple(body["ids"])
    return replace(
        request,
        resume_ids=request.resume_ids + ids,
        resume_logprobs=request.resume_logprobs + tuple(body["logprobs"]),
        resume_raw_logprobs=request.resume_raw_logprobs + tuple(body["raw"]),
        resume_mask=request.resume_mask + (1,) * len(ids),
    )


def _line(kind: str, body: dict[str, object]) -> bytes:
    return checked(dumps([kind, body]))
