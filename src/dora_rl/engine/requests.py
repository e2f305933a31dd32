"""The books of requests that every engine keeps: in, on, out exactly once, with or without a token.

What computes is the subclass's: it says which versions it holds, where a request is and what makes
it run. Invariants: every submitted request is here or has ended exactly once; what has no chance
here ends at once, as a refused output of the next step; the journal hears of every change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dora_rl.engine.journal import Journal
from dora_rl.engine.sequence import (
    Decode,
    Output,
    Request,
    Status,
    hits_stop_string,
    new_sequence,
)
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.types import Finish, RequestId, SamplingParams, UserError, Version


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges; `free + used + cached == total` blocks, and `exact` says whether
    rows were measured not to depend on their batch mates."""

    free_blocks: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    host_blocks: int
    running: int
    waiting: int
    spilled: int
    parked: int
    idle: int
    kv_tokens: int
    steps: int
    decode_tokens: int
    prefill_tokens: int
    prefix_tokens: int
    preemptions: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must fit into: ids below `vocab`, `context` tokens, blocks of the KV pool."""

    vocab: int
    context: int
    num_blocks: int
    block_tokens: int


class RequestBook(ABC):
    """See the module docstring. `decode` turns token ids into text, for stop strings."""

    def __init__(
        self,
        limits: Limits,
        eos_ids: tuple[int, ...],
        decode: Decode | None,
        journal: Journal | None,
    ) -> None:
        self.limits, self.eos_ids = limits, eos_ids
        self.decode, self.journal = decode, journal
        self.notes: list[str] = []  # for whoever watches
        self.outputs: list[Output] = []
        self._num_arrived = 0
        self.num_steps = 0
        self.num_decode_tokens = 0
        self._num_prefill_tokens = 0

    # ------------------------------------------------- what an engine does itself

    @abstractmethod
    def versions(self) -> tuple[Version, ...]:
        """Those that are resident, in order."""

    @abstractmethod
    def load_layers(self, version: Version, source: Any, verify: bool = True) -> Iterator[str]:
        """Load layer by layer; call `step` between the items and other versions go on decoding."""

    @abstractmethod
    def find(self, request: RequestId) -> Seq | None:
        """A request that is here; without `drain` before, its end may be in flight."""

    @abstractmethod
    def sequences(self) -> Iterable[Seq]:
        """Every request that is here."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for what is in flight; its outputs come with the next step."""

    @abstractmethod
    def _enter(self, seq: Seq) -> None:
        """A new request is here, and nothing of it runs yet."""

    @abstractmethod
    def _run(self, seq: Seq) -> None:
        """Sample on, from whatever is known of it."""

    @abstractmethod
    def _rest(self, seq: Seq) -> None:
        """A turn of a session ended: idle until the next one."""

    @abstractmethod
    def _leave(self, seq: Seq) -> None:
        """Drop every trace of it."""

    @abstractmethod
    def _refusal(self, seq: Seq, length: int) -> str:
        """Why a request of `length` tokens can never run in this engine, or an empty string."""

    # ---------------------------------------------------------------- requests

    @property
    def context_max(self) -> int:
        return self.limits.context

    @property
    def length_max(self) -> int:
        """Tokens that a request can ever have here, prompt included."""
        return min(self.limits.context, (self.limits.num_blocks - 1) * self.limits.block_tokens)

    def load(self, version: Version, source: Any, verify: bool = True) -> None:
        """Load a version at once. `verify` checks a sealed version's checksum and canary."""
        for _ in self.load_layers(version, source, verify):
            pass

    def submit(self, request: Request) -> None:
        """Queue a request; a hopeless one ends at once, as a refused output of the next step."""
        seq = self.new_sequence(request)
        reason = self.refusal(seq)
        if reason:
            self._refuse(seq, reason)
            return
        self._enter(seq)
        self.note(seq)
        finish = self.finish_of(seq)
        if finish is None:
            self._run(seq)
        else:
            self._end(seq, finish)

    def new_sequence(self, request: Request) -> Seq:
        self._num_arrived += 1
        return new_sequence(request, self._num_arrived, self.eos_ids)

    def abort(self, request: RequestId) -> bool:
        """Drop a request (or close a session) without an output; True if it was here."""
        self.drain()
        here = self.find(request) is not None
        if here:
            self.forget(request)
        return here

    def extend(
        self, request: RequestId, token_ids: Sequence[int], params: SamplingParams | None = None
    ) -> None:
        """Next turn of a kept session: append given tokens, then sample on.

        Only the new tokens are prefilled where the cache has the others. They enter the response
        with loss mask 0.
        """
        seq = self.known(request, Status.IDLE)
        seq.begin_turn(token_ids, params, self.eos_ids)
        reason = self.refusal(seq, queued=True)
        if reason:
            self.forget(request)
            self._refuse(seq, reason)
            return
        self._run(seq)
        self.note(seq)

    def unpark(self, request: RequestId) -> None:
        seq = self.known(request, Status.PARKED)
        self.check_resident(request, seq.version)
        self.go_on(seq)

    def is_parked(self, request: RequestId) -> bool:
        seq = self.find(request)
        return seq is not None and seq.status is Status.PARKED

    def forget(self, request: RequestId) -> None:
        """Drop every trace of a request."""
        seq = self.find(request)
        assert seq is not None
        self._leave(seq)
        if self.journal:
            self.journal.end(request)

    def refusal(self, seq: Seq, queued: bool = False) -> str:
        """Why a sequence can never run here, or an empty string."""
        ids, limits = seq.tokens, self.limits
        if not queued and self.find(seq.id) is not None:
            return f"request {tuple(seq.id)} is already in this engine"
        if seq.version not in self.versions():
            return f"version {seq.version} is not resident (resident: {list(self.versions())})"
        if not seq.num_prompt:
            return "the prompt is empty"
        if min(ids) < 0 or max(ids) >= limits.vocab:
            bad = next(token for token in ids if not 0 <= token < limits.vocab)
            return f"token id {bad} is outside the vocabulary of {limits.vocab}"
        length = seq.num_prompt + max(seq.response_max, seq.num_response)
        if length > limits.context:
            return f"{length} tokens (prompt + tokens_max) exceed the context of {limits.context}"
        return self._refusal(seq, length)

    # ----------------------------------------------------------- inside a step

    def hand_out(self, num_steps: int) -> list[Output]:
        """What every request gained in the steps just done."""
        self.num_steps += num_steps
        outputs, self.outputs = self.outputs, []
        if self.journal:
            self.journal.step(self.sequences(), num_steps, idle=not self.has_work())
        return outputs

    def gain(
        self,
        seq: Seq,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        raw_logprobs: Sequence[float],
        top: Sequence[Any],
        finish: Finish | None,
    ) -> None:
        """Tokens that the sequence has now; `finish` where they end its response."""
        self.num_decode_tokens += len(token_ids)
        if self.journal:
            self.journal.tokens(seq.id, token_ids, logprobs, raw_logprobs)
        if finish is not None:
            self._end(seq, finish, tuple(token_ids), tuple(logprobs), tuple(top))
        elif token_ids:
            gained = Output(seq.request.id, tuple(token_ids), tuple(logprobs), None, tuple(top))
            self.outputs.append(gained)

    def fail(self, seq: Seq, why: str) -> None:
        seq.error = f"request {tuple(seq.id)}: {why}"
        self._end(seq, Finish.ERROR)

    def finish_of(self, seq: Seq, sampled: bool = True) -> Finish | None:
        """Whether the response is complete with its newest token."""
        if not seq.turns:
            return Finish.STOP  # a session that others open: see `Request.turns`
        num_known = len(seq.logprobs)
        if not num_known:
            return None
        if seq.stop_ids or seq.request.params.stop_strings:
            drawn = sampled and num_known == seq.num_response and seq.loss_mask[-1]
            if drawn and (seq.tokens[-1] in seq.stop_ids or hits_stop_string(seq, self.decode)):
                return Finish.STOP
        return Finish.LENGTH if num_known >= seq.response_max else None

    def go_on(self, seq: Seq) -> None:
        """Sample on; a session whose turn had ended is idle again, and says so again."""
        finish = self.finish_of(seq) if seq.request.keep else None
        if finish is None:
            self._run(seq)
        else:
            self._end(seq, finish)

    def _end(
        self,
        seq: Seq,
        finish: Finish,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
        top: tuple = (),
    ) -> None:
        seq.finish = finish
        if seq.request.keep and finish in (Finish.STOP, Finish.LENGTH):
            self._rest(seq)
        else:
            self.forget(seq.id)
        self.outputs.append(Output(seq.id, tokens, logprobs, seq.trajectory(), top))

    def _refuse(self, seq: Seq, reason: str) -> None:
        seq.finish, seq.error = Finish.REFUSED, reason
        self.outputs.append(Output(seq.id, (), (), seq.trajectory()))

    def known(self, request: RequestId, status: Status | None = None) -> Seq:
        self.drain()
        seq = self.find(request)
        if seq is None or (status is not None and seq.status is not status):
            state = "not here" if seq is None else seq.status.name.lower()
            wanted = "" if status is None else f", not {status.name.lower()}"
            raise UserError(f"request {tuple(request)} is {state}{wanted}")
        return seq

    def check_resident(self, request: RequestId, version: Version) -> None:
        if version not in self.versions():
            raise UserError(f"request {tuple(request)}: version {version} is not resident")

    def note(self, seq: Seq) -> None:
        if self.journal:
            self.journal.state(seq)
