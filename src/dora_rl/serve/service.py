"""Answers chat and completion requests with the native engine, several versions at once.

Lives on the event loop; the engine has a thread of its own. New requests and sessions go to the
live version; a session stays where it began. Invariant: a request is started only on a version
that is resident, and a version is retired only when nobody is on it: it has as many pins as there
are sessions and running requests on it. When a generation is closed nothing of it is left in the
engine, except a session that may go on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dora_rl.chat.conversation import ChatTemplate, Conversation, Turn
from dora_rl.chat.errors import (
    ApiError,
    bad_request,
    context_too_long,
    model_not_found,
    server_error,
    server_full,
    session_busy,
    session_not_found,
)
from dora_rl.chat.requests import Ask, Message
from dora_rl.chat.service import ChatAsk, Piece
from dora_rl.engine.sequence import Request
from dora_rl.serve.engine_thread import Abort, EngineThread, Load, Retire, Start
from dora_rl.types import Finish, RequestId, SamplingParams, Version

STREAM = RequestId(0, 0)  # with a given seed the draws do not depend on what else was asked


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Everything has a limit."""

    requests_max: int = 512  # responses generated or queued at once
    sessions_max: int = 4096
    session_idle_s_max: float = 900.0


class EngineService:
    """Implements `chat.service.Service`."""

    def __init__(
        self,
        name: str,
        template: ChatTemplate,
        engine: EngineThread,
        limits: ServeLimits,
        record: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.template, self.engine = name, template, engine
        self._vocab, self._context_max = engine.engine.spec.vocab, engine.engine.context_max
        self._limits, self._record, self._now = limits, record, now
        self.sessions = Sessions(limits.sessions_max, limits.session_idle_s_max)
        self._resident: list[Version] = []
        self.live: Version = -1
        self.num_running = 0
        self._groups = itertools.count(1)
        self._created = int(time.time())

    def healthy(self) -> bool:
        return not self.engine.broken

    # ---------------------------------------------------------------- versions

    def has_room(self) -> bool:
        return len(self._resident) < self.engine.engine.options.versions_max

    def begin_load(self, version: Version, source: Any) -> Future[None]:
        """Load beside the others; `went_live` or `load_failed` must follow."""
        self._resident.append(version)
        done: Future[None] = Future()
        self.engine.tell(Load(version, source, done))
        return done

    def went_live(self, version: Version) -> None:
        self.live = version
        self.retire_unused()

    def load_failed(self, version: Version) -> None:
        self._resident.remove(version)

    def retire_unused(self) -> list[Version]:
        gone = [v for v in self.sessions.unused(self._resident, self.live) if v < self.live]
        for version in gone:
            self._resident.remove(version)
            self.engine.tell(Retire(version))
        return gone

    def models(self) -> list[dict[str, Any]]:
        versions = [version for version in self._resident if version <= self.live]
        base = {"object": "model", "created": self._created, "owned_by": "dora-rl"}
        base["max_model_len"], name = self._context_max, self.name
        named = [(name, self.live), *((f"{name}@{version}", version) for version in versions)]
        return [{"id": model} | base | {"weight_version": version} for model, version in named]

    def _version_of(self, model: str) -> Version | None:
        """None: whatever is live. `NAME@3` asks for one that is resident."""
        name, _, number = model.partition("@")
        if model == self.name:
            return None
        known = [version for version in self._resident if version <= self.live]
        if name != self.name or not number.isdigit() or int(number) not in known:
            raise model_not_found(model, self.name)
        return int(number)

    # ---------------------------------------------------------------- sessions

    def open_session(self, session_id: str | None) -> dict[str, Any]:
        if session_id is not None and self.sessions.find(session_id) is not None:
            return self.sessions.get(session_id).summary()
        return self._open(session_id, self.live).summary()

    def read_session(self, session_id: str) -> dict[str, Any]:
        return self.sessions.get(session_id).record()

    async def end_session(self, session_id: str, reward: float | None) -> dict[str, Any]:
        if self.sessions.get(session_id).busy:
            raise session_busy(session_id)
        session = self.sessions.end(session_id)
        self.engine.tell(Abort(session.request))
        self.retire_unused()
        if self._record is not None and session.conversation.num_turns:
            line = json.dumps(session.record(reward), ensure_ascii=False)
            with self._record.open("a") as file:
                file.write(line + "\n")
        return session.summary() | {"reward": reward}

    async def end_idle_sessions(self) -> int:
        idle = self.sessions.idle(self._now())
        for session in idle:
            await self.end_session(session.id, None)
        return len(idle)

    def _open(self, session_id: str | None, version: Version) -> Session:
        request = RequestId(next(self._groups), 0)
        return self.sessions.open(session_id, version, request, self._now())

    def _session_of(self, ask: Ask) -> Session | None:
        """The session to go on with, checked; None where it has yet to begin."""
        assert ask.session_id is not None
        if ask.num_samples != 1:
            raise bad_request("a session goes on with one reply: 'n' must be 1", "n")
        wanted = self._version_of(ask.model)
        session = self.sessions.find(ask.session_id)
        if session is not None and session.busy:
            raise session_busy(session.id)
        if session is not None and wanted not in (None, session.version):
            raise bad_request(f"the session is on version {session.version}", "model")
        return session

    # ---------------------------------------------------------------- requests

    async def chat(self, request: ChatAsk) -> EngineGeneration:
        ask = request.ask
        written = (request.messages, request.tools, request.template_options)
        if ask.session_id is None:
            return self._begin(ask, [self.template.prompt_ids(*written)])
        session = self._session_of(ask)
        past = Conversation() if session is None else session.conversation
        turn = past.next_turn(*written, self.template, self.engine.engine.spec.eos_ids)
        params = self._params(ask, turn.prompt_ids)
        if session is None:
            wanted = self._version_of(ask.model)
            session = self._open(ask.session_id, self.live if wanted is None else wanted)
        self._take_places(1)
        if not turn.continued and ask.seed is not None:
            session.seed = ask.seed
        return self._begin_turn(session, turn, params)

    async def complete(self, ask: Ask, prompts: Sequence[tuple[int, ...]]) -> EngineGeneration:
        if ask.session_id is not None:
            raise bad_request("sessions are for /v1/chat/completions", "session_id")
        return self._begin(ask, prompts)

    def _begin(self, ask: Ask, prompts: Sequence[tuple[int, ...]]) -> EngineGeneration:
        """Every prompt `n` times, without a session."""
        wanted = self._version_of(ask.model)
        version = self.live if wanted is None else wanted
        params = [self._params(ask, prompt) for prompt in prompts]
        self._take_places(len(prompts) * ask.num_samples)
        requests: list[Request] = []
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        for number, prompt in enumerate(prompts):
            group = next(self._groups)
            requests += [
                Request(
                    RequestId(group, sample),
                    version,
                    prompt,
                    params[number],
                    seed,
                    stream=RequestId(number, sample),
                )
                for sample in range(ask.num_samples)
            ]
        ids = [request.id for request in requests]
        generation = EngineGeneration(version, prompts, ids, self._closed)
        self.sessions.pin(version)
        for index, one in enumerate(requests):
            self.engine.tell(Start(one, index, generation.sink))
        return generation

    def _begin_turn(self, session: Session, turn: Turn, params: SamplingParams) -> EngineGeneration:
        """The next turn of a session; the first one too."""
        past = session.conversation
        base = Request(
            session.request,
            session.version,
            turn.prompt_ids,
            params,
            session.seed,
            keep=True,
            stream=STREAM,
        )
        if turn.continued:
            none = (0,) * len(turn.new_ids)
            base = replace(
                base,
                prompt_ids=past.prompt_ids,
                resume_ids=(*past.token_ids, *turn.new_ids),
                resume_logprobs=(*past.logprobs, *map(float, none)),
                resume_mask=(*past.loss_mask, *none),
                response_max=len(past.token_ids) + len(none) + params.tokens_max,
                turns=past.num_turns + 1,
            )
        session.busy = True
        prompts = [turn.prompt_ids]
        generation = EngineGeneration(
            session.version, prompts, [session.request], self._closed, session, turn
        )
        self.sessions.pin(session.version)
        new_ids = turn.new_ids if turn.continued else None
        self.engine.tell(Start(base, 0, generation.sink, new_ids))
        return generation

    def _params(self, ask: Ask, prompt: Sequence[int]) -> SamplingParams:
        room = self._context_max - len(prompt)
        wanted = room if ask.tokens_max is None else ask.tokens_max
        if not prompt:
            raise bad_request("the prompt has no tokens")
        if max(prompt) >= self._vocab:
            raise bad_request(f"token id {max(prompt)} is outside of {self._vocab}", "prompt")
        if room < 1 or wanted > room:
            raise context_too_long(len(prompt), max(wanted, 1), self._context_max)
        top_n = min(ask.params.logprobs_top_n, self._vocab)
        return replace(ask.params, tokens_max=wanted, logprobs_top_n=top_n)

    def _take_places(self, count: int) -> None:
        if self.engine.broken:
            raise server_error(f"the engine failed ({self.engine.reason}); restart the server")
        if self.num_running + count > self._limits.requests_max:
            raise server_full(self._limits.requests_max)
        self.num_running += count

    def _closed(self, generation: EngineGeneration, unfinished: list[RequestId]) -> None:
        """A client has its answer, or is gone. A turn nobody has seen is taken back."""
        self.num_running -= generation.num_requests
        session = generation.owner
        if session is not None:
            session.busy, session.used_s = False, self._now()
            if not generation.reply_known and session.request not in unfinished:
                unfinished = [*unfinished, session.request]
        for request in unfinished:
            self.engine.tell(Abort(request))
        self.sessions.unpin(generation.version)
        self.retire_unused()


class EngineGeneration:
    """Implements `chat.service.Generation`. `on_close(unfinished)` is called exactly once."""

    def __init__(
        self,
        version: Version,
        prompts: Sequence[tuple[int, ...]],
        requests: Sequence[RequestId],
        on_close: Callable[[EngineGeneration, list[RequestId]], None],
        session: Session | None = None,
        turn: Turn | None = None,
    ) -> None:
        self.version, self.prompts = version, prompts
        self.turn, self.owner = turn, session
        self.num_requests = len(requests)
        self._on_close = on_close
        self._running = dict(enumerate(requests))
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()
        self.sink = self._queue.put_nowait
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._closed = False
        self.reply_known = False

    @property
    def session(self) -> dict[str, Any] | None:
        if self.owner is None or self.turn is None:
            return None
        number = self.owner.conversation.num_turns + (0 if self.reply_known else 1)
        note: dict[str, Any] = {"id": self.owner.id, "continued": self.turn.continued}
        note["turn"] = number if self.turn.continued else 1
        return note | ({"restarted_because": self.turn.why} if self.turn.why else {})

    async def pieces(self) -> AsyncIterator[Piece]:
        while self._running:
            piece = await self._queue.get()
            if piece.finish is not None:
                del self._running[piece.choice]
            if piece.finish is Finish.REFUSED:
                raise bad_request(piece.error)
            if piece.finish is Finish.ERROR:
                raise server_error(piece.error)
            if self.owner is not None:
                self._token_ids += piece.token_ids
                self._logprobs += piece.logprobs
            yield piece

    def replied(self, reply: Message) -> None:
        if self.owner is not None and self.turn is not None and self._token_ids:
            past = self.owner.conversation
            past.add(self.turn, self._token_ids, self._logprobs, reply)
            self.reply_known = True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close(self, list(self._running.values()))


@dataclass(slots=True)
class Session:
    """One line of turns. `request` is its name in the engine, for all turns."""

    id: str
    version: Version
    request: RequestId
    seed: int
    used_s: float
    conversation: Conversation = field(default_factory=Conversation)
    busy: bool = False

    def summary(self) -> dict[str, Any]:
        past = self.conversation
        return {
            "id": self.id,
            "object": "session",
            "weight_version": self.version,
            "turns": past.num_turns,
            "num_tokens": len(past.prompt_ids) + len(past.token_ids),
        }

    def record(self, reward: float | None = None) -> dict[str, Any]:
        """Everything a trainer would want to know."""
        past = self.conversation
        return self.summary() | {
            "messages": past.messages,
            "prompt_token_ids": list(past.prompt_ids),
            "token_ids": list(past.token_ids),
            "logprobs": list(past.logprobs),
            "loss_mask": list(past.loss_mask),
            "reward": reward,
        }


class Sessions:
    """All of them, and the pins of the versions."""

    def __init__(self, num_max: int, idle_s_max: float) -> None:
        self._num_max, self._idle_s_max = num_max, idle_s_max
        self._by_id: dict[str, Session] = {}
        self._pins: Counter[Version] = Counter()

    def find(self, session_id: str) -> Session | None:
        return self._by_id.get(session_id)

    def get(self, session_id: str) -> Session:
        if session_id not in self._by_id:
            raise session_not_found(session_id)
        return self._by_id[session_id]

    def open(
        self, session_id: str | None, version: Version, request: RequestId, now: float
    ) -> Session:
        if len(self._by_id) >= self._num_max:
            message = f"The server has {self._num_max} open sessions; end one and try again"
            raise ApiError(429, message, code="too_many_sessions", kind="rate_limit_error")
        name = session_id or f"session-{secrets.token_hex(8)}"
        session = Session(name, version, request, secrets.randbits(63), now)
        self._by_id[name] = session
        self.pin(version)
        return session

    def end(self, session_id: str) -> Session:
        session = self.get(session_id)
        del self._by_id[session_id]
        self.unpin(session.version)
        return session

    def idle(self, now: float) -> list[Session]:
        """Those that nobody has used for too long."""
        oldest = now - self._idle_s_max
        return [s for s in self._by_id.values() if not s.busy and s.used_s < oldest]

    def on(self, version: Version) -> int:
        """How many sessions stay on a version."""
        return sum(session.version == version for session in self._by_id.values())

    def pin(self, version: Version) -> None:
        self._pins[version] += 1

    def unpin(self, version: Version) -> None:
        assert self._pins[version] > 0, f"version {version} has no pin"
        self._pins[version] -= 1

    def unused(self, versions: Collection[Version], live: Version) -> list[Version]:
        """Versions that can go: older than the live one, and nobody is on them."""
        return [v for v in sorted(versions) if v != live and not self._pins[v]]
