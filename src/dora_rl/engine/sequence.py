"""A request and the state it has inside one engine. Pure: no torch, no I/O, no clock.

    tokens          p p p p p | r r r r          prompt, then response (sampled or given)
    num_computed    ------------^                 tokens whose KV is in the cache
    num_tokens      -----------------^            known tokens plus those still in flight

A sequence has `num_tokens - num_computed` rows to run; one row left means it decodes. Invariant:
a sequence names exactly one version at any time, and every token of it was computed under the
version of its segment.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import numpy as np

from dora_rl.types import (
    Finish,
    RequestId,
    SamplingParams,
    Segment,
    Trajectory,
    Version,
)

Decode: TypeAlias = Callable[[Seq[int]], str]
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for.

    `resume_ids` are response tokens that were already sampled elsewhere (from a journal); they are
    prefilled, keep their log-probs, and sampling goes on at the next position. `resume_mask` is
    their loss mask (all ones when empty). `keep` keeps the blocks after the turn ends, so that
    `Engine.extend` can continue the session; with `turns=0` it begins idle, and the first `extend`
    opens it. `stream` names the random stream to draw from, where it is not the request's own: two
    requests with one stream and seed draw alike.

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
    num_forced: int = 0  # response tokens that are scored rather than sampled
    num_scored: int = 0  # response tokens whose log-prob is known or in flight
    response_max: int = 0  # response length at which the turn ends
    blocks: list[int] = field(default_factory=list)
    table_dirty: bool = True  # `blocks` changed since the runner last copied it
    slot_dirty: bool = True  # it entered a slot since the runner last wrote its entry
    num_host_blocks: int = 0
    num_registered: int = 0  # leading prompt blocks that the prefix cache knows
    digests: list[bytes] = field(default_factory=list)
    slot: int = -1
    status: Status = Status.WAITING
    stop_ids: frozenset[int] = frozenset()
    plain: bool = True  # its rows need nothing but a temperature to be drawn
    turns: int = 1
    finish: Finish | None = None
    error: str = ""

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

    def change_version(self, version: Version) -> None:
        """What follows is generated under other weights (the `partial` baseline only)."""
        self.version = version
        start = self.num_response
        if self.segments[-1].start == start:
            self.segments.pop()
        self.segments.append(Segment(start, version))

    def trajectory(self) -> Trajectory:
        """The response as the rest of the system sees it."""
        raw = self.raw_logprobs
        return Trajectory(
            request=self.id,
            version=self.version,
            token_ids=np.array(self.tokens[self.num_prompt :], np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            loss_mask=np.array(self.loss_mask, np.uint8),
            finish=self.finish or Finish.ERROR,
            segments=tuple(self.segments),
            prompt_ids=np.array(self.tokens[: self.num_prompt], np.int32),
            raw_logprobs=np.array(raw, np.float32) if raw else None,
            turns=self.turns,
            error=self.error,
        )


def new_sequence(request: Request, arrival: int, eos_ids: Seq[int]) -> Sequence:
    """A fresh sequence: prompt, then resumed tokens, then forced ones."""
    params = request.params
    forced = params.forced_ids[len(request.resume_ids) :]
    tokens = [*request.prompt_ids, *request.resume_ids, *forced]
    mask = request.resume_mask or (1,) * len(request.resume_ids)
    seq = Sequence(
        request=request,
        version=request.version,
        arrival=arrival,
        tokens=tokens,
        num_prompt=len(request.prompt_ids),
        key=sampling_key(request.seed, request.stream or request.id),
        logprobs=list(request.resume_logprobs),
        raw_logprobs=list(request.resume_raw_logprobs),
        loss_mask=list(mask),
        segments=list(request.resume_segments) or [Segment(0, request.version)],
        num_tokens=len(tokens),
        num_forced=len(request.resume_ids) + len(forced),
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
