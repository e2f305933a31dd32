"""A request, the state it has inside one engine, and the books that every engine keeps of them.

Pure: no torch, no clock, and no I/O but what the journal does that it is given.

    tokens          p p p p p | r r r r          prompt, then response (sampled or given)
    num_computed    ------------^                 tokens whose KV is in the cache
    num_tokens      -----------------^            known tokens plus those still in flight

A sequence has `num_tokens - num_computed` rows to run; one row left means it decodes. Invariant:
a sequence names exactly one version at any time, and every token of it was computed under the
version of its segment.

What computes is the subclass's of `RequestBook`: it says which versions it holds, where a request
is and what makes it run. Invariants: every submitted request is here or has ended exactly once;
what has no chance here ends at once, as a refused output of the next step; the journal hears of
every change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from dora_rl.engine.past import NO_PAST, Past, joined_segments, past_of, whole_routing
from dora_rl.histories import history_of
from dora_rl.types import (
    Branch,
    Finish,
    RequestId,
    SamplingParams,
    Segment,
    Trajectory,
    UserError,
    Version,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dora_rl.engine.journal import Journal

Decode: TypeAlias = Callable[[Seq[int]], str]
_MASK = (1 << 64) - 1
BRANCH_BITS = 32  # samples of a group are fewer than this many bits can say


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for.

    `resume_ids` are response tokens that were already sampled elsewhere (from a journal); they are
    prefilled, keep their log-probs, and sampling goes on at the next position. `resume_mask` is
    their loss mask (all ones when empty). `keep` keeps the blocks after the turn ends, so that
    `Engine.extend` can continue the session; with `turns=0` it begins idle, and the first `extend`
    opens it. `stream` names the random stream to draw from, where it is not the request's own: two
    requests with one stream and seed draw alike. `past`: it is a branch, whose prompt is all that
    it follows; what the session has beside that is there.

        Request(RequestId(7, 3), 2, (5, 6, 7), SamplingParams(tokens_max=16), seed=1)
    """

    id: RequestId
    version: Version
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    resume_ids: tuple[int, ...] = ()
    resume_logprobs: tuple[float, ...] = ()
    resume_raw_logprobs: tuple[float, ...] = ()
    resume_mask: tuple[int, ...] = ()
    resume_segments: tuple[Segment, ...] = ()
    response_max: int = 0  # where the turn ends, when it is not the first; 0: params.tokens_max
    turns: int = 1
    keep: bool = False
    stream: RequestId | None = None
    past: Past | None = None


class Output(NamedTuple):
    """What one step gave one request: its new tokens and, when it ended, the whole trajectory."""

    id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    trajectory: Trajectory | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


class Status(Enum):
    """Where a sequence is: queued from scratch, running, queued with its KV (on the host or, when
    it just arrived, on the device), put aside, between two turns of a session, gone."""

    WAITING = auto()
    RUNNING = auto()
    SPILLED = auto()
    PARKED = auto()
    IDLE = auto()
    ENDED = auto()


def mix64(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit integers that scatters every bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sampling_key(seed: int, request: RequestId) -> int:
    """The random stream of one sample, as a signed 64-bit integer; positions count along it."""
    key = mix64(mix64(mix64(seed & _MASK) ^ (request.group & _MASK)) ^ (request.sample & _MASK))
    return key - (1 << 64) if key >> 63 else key


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one request in one engine."""

    request: Request
    version: Version
    arrival: int
    tokens: list[int]
    num_prompt: int
    key: int
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    num_computed: int = 0
    num_tokens: int = 0
    num_scored: int = 0  # response tokens whose log-prob is known or in flight
    response_max: int = 0  # response length at which the turn ends
    blocks: list[int] = field(default_factory=list)
    table_dirty: bool = True  # `blocks` changed since the runner last copied it
    slot_dirty: bool = True  # it entered a slot since the runner last wrote its entry
    num_host_blocks: int = 0
    num_registered: int = 0  # leading prompt blocks that the prefix cache knows
    digests: tuple[bytes, ...] = ()  # of its prompt, where prompts are shared
    slot: int = -1
    status: Status = Status.WAITING
    stop_ids: frozenset[int] = frozenset()
    plain: bool = True  # its rows need nothing but a temperature to be drawn
    turns: int = 1
    finish: Finish | None = None
    error: str = ""
    # Of a mixture: which experts each token went to, as it was when the turn ended.
    routing: NDArray[Any] | None = None

    @property
    def id(self) -> RequestId:
        return self.request.id

    @property
    def num_response(self) -> int:
        return len(self.tokens) - self.num_prompt

    def begin_turn(
        self, token_ids: Seq[int], params: SamplingParams | None, eos_ids: Seq[int]
    ) -> None:
        """Given tokens enter the response with loss mask 0; the next turn samples behind them."""
        if params is not None:
            self.request = replace(self.request, params=params)
            self.stop_ids = stop_ids_of(params, eos_ids)
            self.plain = is_plain(params)
        self.tokens.extend(token_ids)
        self.num_tokens = len(self.tokens)
        self.logprobs.extend([0.0] * len(token_ids))
        if self.request.params.raw_logprobs:
            self.raw_logprobs.extend([0.0] * len(token_ids))
        self.loss_mask.extend([0] * len(token_ids))
        self.num_scored = self.num_response
        self.response_max = self.num_response + self.request.params.tokens_max
        self.turns += 1
        self.finish = None

    def row_ids(self, start: int, num_rows: int, drafts: tuple[int, ...]) -> list[int]:
        """Of rows from a position on, the last of which are guesses."""
        known = self.tokens[start : start + num_rows - len(drafts)]
        return [*known, *drafts] if drafts else known

    def change_version(self, version: Version) -> None:
        """What follows is generated under other weights (the `partial` baseline only)."""
        self.version = version
        start = self.num_response
        if self.segments[-1].start == start:
            self.segments.pop()
        self.segments.append(Segment(start, version))

    def trajectory(self) -> Trajectory:
        """The response as the rest of the system sees it, with all branches."""
        past, prompt = self.request.past, self.tokens[: self.num_prompt]
        segments = self.segments
        if past is not None:
            prompt, segments = past.prompt_ids, joined_segments(past, segments)
        before = past or NO_PAST
        raw = [*before.raw_logprobs, *self.raw_logprobs]
        return Trajectory(
            request=self.id,
            version=self.version,
            token_ids=np.array([*before.token_ids, *self.tokens[self.num_prompt :]], np.int32),
            logprobs=np.array([*before.logprobs, *self.logprobs], np.float32),
            loss_mask=np.array([*before.loss_mask, *self.loss_mask], np.uint8),
            finish=self.finish or Finish.ERROR,
            segments=tuple(segments),
            prompt_ids=np.array(prompt, np.int32),
            raw_logprobs=np.array(raw, np.float32) if raw else None,
            turns=self.turns,
            error=self.error,
            branches=before.branches,
            expert_ids=whole_routing(self.routing, len(self.tokens), self.num_prompt, past),
        )


def branched(seq: Sequence, branch: Branch, new_ids: Seq[int], params: SamplingParams) -> Request:
    """The request that goes on from an earlier state of an idle session."""
    so_far = seq.trajectory()
    prompt, ids = so_far.prompt_ids, so_far.token_ids
    shared = history_of(prompt, ids, so_far.branches, branch.parent)[: len(prompt) + branch.fork]
    past = past_of(so_far, branch, new_ids)
    return Request(
        id=seq.id,
        version=seq.version,
        prompt_ids=(*shared.tolist(), *new_ids),
        params=params,
        seed=seq.request.seed,
        turns=seq.turns + 1,
        keep=True,
        # Positions count from the branch's beginning, so it draws from a stream of its own.
        stream=RequestId(seq.id.group, seq.id.sample + ((len(past.branches) - 1) << BRANCH_BITS)),
        past=past,
    )


def new_sequence(request: Request, arrival: int, eos_ids: Seq[int]) -> Sequence:
    """A fresh sequence: prompt, then resumed tokens, then forced ones."""
    params = request.params
    forced = params.forced_ids[len(request.resume_ids) :]
    tokens = [*request.prompt_ids, *request.resume_ids, *forced]
    seq = Sequence(
        request=request,
        version=request.version,
        arrival=arrival,
        tokens=tokens,
        num_prompt=len(request.prompt_ids),
        key=sampling_key(request.seed, request.stream or request.id),
        logprobs=list(request.resume_logprobs),
        raw_logprobs=list(request.resume_raw_logprobs),
        loss_mask=list(request.resume_mask) or [1] * len(request.resume_ids),
        segments=list(request.resume_segments) or [Segment(0, request.version)],
        num_tokens=len(tokens),
        num_scored=len(request.resume_ids),
        response_max=max(request.response_max or params.tokens_max, len(params.forced_ids)),
        stop_ids=stop_ids_of(params, eos_ids),
        plain=is_plain(params),
        turns=request.turns,
    )
    if seq.segments[-1].version != request.version:
        seq.segments.append(Segment(seq.num_scored, request.version))
    return seq


def is_filtered(params: SamplingParams) -> bool:
    """Whether it draws from less than the whole distribution."""
    return bool(params.top_k or params.top_p < 1 or params.min_p)


def is_plain(params: SamplingParams) -> bool:
    """No filter, and no other log-prob than that of the token under the sampling policy."""
    return not (is_filtered(params) or params.raw_logprobs or params.logprobs_top_n)


def stop_ids_of(params: SamplingParams, eos_ids: Seq[int]) -> frozenset[int]:
    """Ids that end a turn."""
    return frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))


def hits_stop_string(seq: Sequence, decode: Decode | None) -> bool:
    """Whether a stop string ends in the newest token."""
    strings = seq.request.params.stop_strings
    if not strings or decode is None:
        return False
    # A stop string of n characters ends in the newest token and began at most n tokens ago, and not
    # before this turn: an observation may well end in the string.
    num_tokens = max(len(string) for string in strings) + 1
    mask = seq.loss_mask[-num_tokens:]
    drawn = next((i for i, own in enumerate(reversed(mask)) if not own), len(mask))
    tail = decode(seq.tokens[len(seq.tokens) - drawn :])
    return any(string in tail for string in strings)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges; `free + used + cached == total` blocks, and `exact` says whether
    rows were measured not to depend on their batch mates. `drafts`: of each version how many tokens
    were guessed, and how many of them became tokens of a response."""

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
    drafts: Mapping[Version, tuple[int, int]] = field(default_factory=dict)


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
        self._arrivals = count(1)
        self.num_steps = self.num_decode_tokens = self._num_prefill_tokens = 0

    # ------------------------------------------------- what an engine does itself

    @abstractmethod
    def versions(self) -> tuple[Version, ...]:
        """Those that are resident, in order."""

    @abstractmethod
    def load_layers(self, version: Version, source: Any, verify: bool = True) -> Iterator[str]:
        """Load layer by layer; call `step` between the items and other versions go on decoding."""

    @abstractmethod
    def find(self, request: RequestId) -> Sequence | None:
        """A request that is here; without `drain` before, its end may be in flight."""

    @abstractmethod
    def sequences(self) -> Iterable[Sequence]:
        """Every request that is here."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for what is in flight; its outputs come with the next step."""

    def _routing_of(self, seq: Sequence) -> NDArray[Any] | None:
        """Which experts its tokens went to, of those that are computed; None: not recorded."""
        return None

    @abstractmethod
    def _enter(self, seq: Sequence) -> None:
        """A new request is here, and nothing of it runs yet."""

    @abstractmethod
    def _run(self, seq: Sequence) -> None:
        """Sample on, from whatever is known of it."""

    @abstractmethod
    def _rest(self, seq: Sequence) -> None:
        """A turn of a session ended: idle until the next one."""

    @abstractmethod
    def _leave(self, seq: Sequence) -> None:
        """Drop every trace of it."""

    @abstractmethod
    def _refusal(self, seq: Sequence, length: int) -> str:
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
        if reason := self.refusal(seq):
            self._refuse(seq, reason)
            return
        self._enter(seq)
        self.note(seq)
        self._run_or_end(seq, self.finish_of(seq))

    def new_sequence(self, request: Request) -> Sequence:
        return new_sequence(request, next(self._arrivals), self.eos_ids)

    def abort(self, request: RequestId) -> bool:
        """Drop a request (or close a session) without an output; True if it was here."""
        self.drain()
        here = self.find(request) is not None
        if here:
            self.forget(request)
        return here

    def extend(
        self, request: RequestId, token_ids: Seq[int], params: SamplingParams | None = None
    ) -> None:
        """Next turn of a kept session: append given tokens, then sample on.

        Only the new tokens are prefilled where the cache has the others. They enter the response
        with loss mask 0.
        """
        seq = self.known(request, Status.IDLE)
        seq.begin_turn(token_ids, params, self.eos_ids)
        if reason := self.refusal(seq, queued=True):
            self.forget(request)
            self._refuse(seq, reason)
            return
        self._run(seq)
        self.note(seq)

    def branch(
        self, request: RequestId, branch: Branch, token_ids: Seq[int], params: SamplingParams
    ) -> None:
        """Next turn of a kept session from an earlier state of it: go back there, append given
        tokens, sample on. It is prefilled, but for the prompt blocks that the cache knows."""
        old = self.known(request, Status.IDLE)
        old.routing = self._routing_of(old)
        seq = self.new_sequence(branched(old, branch, token_ids, params))
        if reason := self.refusal(seq, queued=True):
            self.forget(request)
            self._refuse(seq, reason)
            return
        self._leave(old)
        self._enter(seq)
        self.note(seq)
        self._run(seq)

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

    def refusal(self, seq: Sequence, queued: bool = False) -> str:
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
        if (length := seq.num_prompt + max(seq.response_max, seq.num_response)) > limits.context:
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
        seq: Sequence,
        token_ids: Seq[int],
        logprobs: Seq[float],
        raw_logprobs: Seq[float],
        top: Seq[Any],
        finish: Finish | None,
    ) -> None:
        """Tokens that the sequence has now; `finish` where they end its response."""
        self.num_decode_tokens += len(token_ids)
        if self.journal:
            self.journal.tokens(seq.id, token_ids, logprobs, raw_logprobs)
        if finish is not None:
            self._end(seq, finish, tuple(token_ids), tuple(logprobs), tuple(top))
        elif token_ids:
            self.outputs.append(Output(seq.id, tuple(token_ids), tuple(logprobs), None, tuple(top)))

    def fail(self, seq: Sequence, why: str) -> None:
        seq.error = f"request {tuple(seq.id)}: {why}"
        self._end(seq, Finish.ERROR)

    def finish_of(self, seq: Sequence, sampled: bool = True) -> Finish | None:
        """Whether the response is complete with its newest token."""
        if not seq.turns:
            return Finish.STOP  # a session that others open: see `Request.turns`
        if not (num_known := len(seq.logprobs)):
            return None
        if seq.stop_ids or seq.request.params.stop_strings:
            drawn = sampled and num_known == seq.num_response and seq.loss_mask[-1]
            if drawn and (seq.tokens[-1] in seq.stop_ids or hits_stop_string(seq, self.decode)):
                return Finish.STOP
        return Finish.LENGTH if num_known >= seq.response_max else None

    def go_on(self, seq: Sequence) -> None:
        """Sample on; a session whose turn had ended is idle again, and says so again."""
        self._run_or_end(seq, self.finish_of(seq) if seq.request.keep else None)

    def _run_or_end(self, seq: Sequence, finish: Finish | None) -> None:
        if finish is None:
            self._run(seq)
        else:
            self._end(seq, finish)

    def _end(
        self,
        seq: Sequence,
        finish: Finish,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
        top: tuple = (),
    ) -> None:
        seq.finish, seq.routing = finish, self._routing_of(seq)
        if seq.request.keep and finish in (Finish.STOP, Finish.LENGTH):
            self._rest(seq)
        else:
            self.forget(seq.id)
        self.outputs.append(Output(seq.id, tokens, logprobs, seq.trajectory(), top))

    def _refuse(self, seq: Sequence, reason: str) -> None:
        seq.finish, seq.error = Finish.REFUSED, reason
        self.outputs.append(Output(seq.id, (), (), seq.trajectory()))

    def known(self, request: RequestId, status: Status | None = None) -> Sequence:
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

    def note(self, seq: Sequence) -> None:
        if self.journal:
            self.journal.state(seq)
