"""Answers chat and completion requests with the native engine, several versions at once.

Lives on the event loop; the engine has a thread of its own. New requests and sessions go to the
live version; a session stays where it began. Invariant: a request is started only on a version
that is resident, and a version is retired only when no session and no running request is on it.
When a generation is closed nothing of it is left in the engine, except a session that may go on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dora_rl.chat.conversation import ChatTemplate, Conversation, Turn
from dora_rl.chat.http import HttpLimits
from dora_rl.chat.requests import (
    ApiError,
    Ask,
    Message,
    bad_request,
    context_too_long,
    model_not_found,
    overloaded,
    server_error,
    server_full,
    session_busy,
    session_not_found,
    too_many_sessions,
)
from dora_rl.chat.service import Piece
from dora_rl.chat.texts import Texts, next_turn
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.serve.engine_thread import EngineThread
from dora_rl.types import Finish, RequestId, SamplingParams, Version

STREAM = RequestId(0, 0)  # with a given seed the draws do not depend on what else was asked


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`watch` is the run directory whose newer versions go live; None: what is served stays."""

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    client_templates: bool = False
    watch: Path | None = None
    watch_s: float = 1.0
    grace_s: float = 10.0
    record: Path | None = None
    chat_template: str | None = None
    num_threads: int = 0
    engine: EngineOptions = field(default_factory=EngineOptions)
    requests_max: int = 512  # responses generated or queued at once
    sessions_max: int = 4096
    session_idle_s_max: float = 900.0
    texts_waiting_max: int = 256  # requests whose text waits to be read
    text_s_max: float = 20.0  # for rendering and tokenising one of them
    http: HttpLimits = field(default_factory=HttpLimits)


class EngineService:
    """Implements `chat.service.Service`."""

    def __init__(
        self,
        options: ServeOptions,
        template: ChatTemplate,
        texts: Texts,
        engine: EngineThread,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.template, self.texts, self.engine = template, texts, engine
        self._vocab, self._context_max = engine.engine.spec.vocab, engine.engine.context_max
        self._options, self._now = options, now
        self._sessions: dict[tuple[str, str], Session] = {}  # by owner and id
        self._running: list[EngineGeneration] = []
        self._resident: list[Version] = []
        self.live: Version = -1
        self._groups = itertools.count(1)
        self._created = int(time.time())

    def healthy(self) -> bool:
        return not self.engine.broken

    # ---------------------------------------------------------------- versions

    def has_room(self) -> bool:
        return len(self._resident) < self.engine.engine.options.versions_max

    async def load(self, version: Version, source: Any) -> None:
        """Beside the others; when all of it is there, it is live."""
        self._resident.append(version)
        done: Future[None] = Future()
        self.engine.tell(self.engine.load, version, source, done)
        try:
            await asyncio.wrap_future(done)
        except BaseException:
            self._resident.remove(version)
            raise
        self.live = version
        self.retire_unused()

    def retire_unused(self) -> None:
        """Versions older than the live one go when nobody is on them."""
        used = {user.version for user in (*self._sessions.values(), *self._running)}
        for version in [v for v in self._resident if v < self.live and v not in used]:
            self._resident.remove(version)
            self.engine.tell(self.engine.engine.retire, version)

    def models(self) -> list[dict[str, Any]]:
        versions = [version for version in self._resident if version <= self.live]
        base = {"object": "model", "created": self._created, "owned_by": "dora-rl"}
        base["max_model_len"], name = self._context_max, self._options.name
        named = [(name, self.live), *((f"{name}@{version}", version) for version in versions)]
        return [{"id": model} | base | {"weight_version": version} for model, version in named]

    def _version_of(self, model: str) -> Version | None:
        """None: whatever is live. `NAME@3` asks for one that is resident."""
        name, _, number = model.partition("@")
        own = self._options.name
        if model == own:
            return None
        known = [version for version in self._resident if version <= self.live]
        if name != own or number not in map(str, known):
            raise model_not_found(model, own)
        return int(number)

    # ---------------------------------------------------------------- sessions

    def open_session(self, session_id: str | None, owner: str) -> dict[str, Any]:
        session = self._sessions.get((owner, session_id or ""))
        if session is None:
            session = self._open(session_id, owner, self.live)
            session.opened = True
        return session.summary()

    def read_session(self, session_id: str, owner: str) -> dict[str, Any]:
        return self._session(session_id, owner).record()

    async def end_session(
        self, session_id: str, owner: str, reward: float | None
    ) -> dict[str, Any]:
        """Its record is on the disk before it is gone; where the disk refuses, it stays."""
        session = self._session(session_id, owner)
        if session.busy:
            raise session_busy(session_id)
        record = self._options.record
        if record is not None and session.conversation.num_turns:
            line = json.dumps(session.record(reward), ensure_ascii=False)
            try:
                with record.open("a") as file:
                    file.write(line + "\n")
            except OSError as error:
                raise record_not_written(error) from None
        self._drop(session)
        return session.summary() | {"reward": reward}

    async def end_idle_sessions(self) -> None:
        oldest = self._now() - self._options.session_idle_s_max
        for session in list(self._sessions.values()):
            if not session.busy and session.used_s < oldest:
                await self.end_session(session.id, session.owner, None)

    def num_sessions_on(self, version: Version) -> int:
        return sum(session.version == version for session in self._sessions.values())

    def _session(self, session_id: str, owner: str) -> Session:
        session = self._sessions.get((owner, session_id))
        if session is None:
            raise session_not_found(session_id)
        return session

    def _open(self, session_id: str | None, owner: str, version: Version) -> Session:
        most = self._options.sessions_max
        if len(self._sessions) >= most:
            raise too_many_sessions(most)
        name = session_id or f"session-{secrets.token_hex(8)}"
        request = RequestId(next(self._groups), 0)
        session = Session(name, owner, version, request, secrets.randbits(63), self._now())
        self._sessions[owner, name] = session
        return session

    def _drop(self, session: Session) -> None:
        del self._sessions[session.owner, session.id]
        self.engine.tell(self.engine.abort, session.request)
        self.retire_unused()

    def _session_of(self, ask: Ask) -> Session:
        """The session to go on with, checked; a new one where it has yet to begin."""
        assert ask.session_id is not None
        if ask.num_samples != 1:
            raise bad_request("a session goes on with one reply: 'n' must be 1", "n")
        wanted = self._version_of(ask.model)
        session = self._sessions.get((ask.owner, ask.session_id))
        if session is None:
            return self._open(ask.session_id, ask.owner, self.live if wanted is None else wanted)
        if session.busy:
            raise session_busy(session.id)
        if wanted not in (None, session.version):
            raise bad_request(f"the session is on version {session.version}", "model")
        return session

    # ---------------------------------------------------------------- requests

    async def chat(self, ask: Ask) -> EngineGeneration:
        if ask.session_id is None:
            return self._begin(ask, ask.prompts)
        session = self._session_of(ask)
        past, ends = session.conversation, self.engine.engine.spec.eos_ids
        session.busy = True  # its text is read meanwhile
        try:
            turn = await next_turn(past, ask, ask.template_options, self.texts, ends)
            params = self._params(ask, turn.prompt_ids)
            self._check_room(1)
        except BaseException:
            session.busy = False
            if not past.num_turns and not session.opened:
                self._drop(session)
            raise
        if not turn.continued and ask.seed is not None:
            session.seed = ask.seed
        return self._begin_turn(session, turn, params)

    async def complete(self, ask: Ask) -> EngineGeneration:
        if ask.session_id is not None:
            raise bad_request("sessions are for /v1/chat/completions", "session_id")
        return self._begin(ask, ask.prompts)

    def _begin(self, ask: Ask, prompts: Sequence[tuple[int, ...]]) -> EngineGeneration:
        """Every prompt `n` times, without a session."""
        wanted = self._version_of(ask.model)
        version = self.live if wanted is None else wanted
        params = [self._params(ask, prompt) for prompt in prompts]
        self._check_room(len(prompts) * ask.num_samples)
        requests: list[Request] = []
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        for number, prompt in enumerate(prompts):
            group = next(self._groups)
            requests += [
                Request(
                    RequestId(group, sample),
                    version,
                    prompt[:1] if ask.echo else prompt,
                    params[number],
                    seed,
                    stream=RequestId(number, sample),
                )
                for sample in range(ask.num_samples)
            ]
        ids = [request.id for request in requests]
        return self._start(EngineGeneration(version, prompts, ids, self._closed), requests)

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
        prompts = [turn.prompt_ids]
        generation = EngineGeneration(
            session.version, prompts, [session.request], self._closed, session, turn
        )
        return self._start(generation, [base], turn.new_ids if turn.continued else None)

    def _start(
        self,
        generation: EngineGeneration,
        requests: Sequence[Request],
        new_ids: tuple[int, ...] | None = None,
    ) -> EngineGeneration:
        self._running.append(generation)
        for index, request in enumerate(requests):
            self.engine.tell(self.engine.begin, request, index, generation.sink, new_ids)
        return generation

    def _params(self, ask: Ask, prompt: Sequence[int]) -> SamplingParams:
        room = self._context_max - len(prompt)
        wanted = room if ask.tokens_max is None else ask.tokens_max
        if not prompt:
            raise bad_request("the prompt has no tokens")
        if ask.echo and len(prompt) + wanted < 2:
            raise bad_request("a prompt of one token has no log-probs to 'echo'", "prompt")
        for name, ids in (("prompt", prompt), ("stop_token_ids", ask.params.stop_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < self._vocab:
                known = f"token ids from 0 to {self._vocab - 1}, those of the vocabulary"
                raise bad_request(f"'{name}' must have {known}", name)
        if room < (0 if ask.echo else 1) or wanted > room:
            raise context_too_long(len(prompt), max(wanted, 1), self._context_max)
        top_n = min(ask.params.logprobs_top_n, self._vocab)
        params = replace(ask.params, tokens_max=wanted, logprobs_top_n=top_n)
        if not ask.echo:
            return params
        # What comes after its first token is scored as a response that is known already.
        again = tuple(prompt[1:])
        return replace(params, forced_ids=again, tokens_max=len(again) + wanted)

    @property
    def num_running(self) -> int:
        """Responses that are generated or queued."""
        return sum(generation.num_requests for generation in self._running)

    def _check_room(self, count: int) -> None:
        if self.engine.broken:
            raise server_error(f"the engine failed ({self.engine.reason}); restart the server")
        if self.num_running + count > self._options.requests_max:
            raise server_full(self._options.requests_max)

    def _closed(self, generation: EngineGeneration, unfinished: list[RequestId]) -> None:
        """A client has its answer, or is gone. A turn nobody has seen is taken back."""
        self._running.remove(generation)
        session = generation.owner
        if session is not None:
            session.busy, session.used_s = False, self._now()
            if not generation.reply_known and session.request not in unfinished:
                unfinished = [*unfinished, session.request]
        for request in unfinished:
            self.engine.tell(self.engine.abort, request)
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


def record_not_written(error: OSError) -> ApiError:
    """The user's disk: the client can come back, and loses nothing meanwhile."""
    refused = overloaded("record", 0)
    refused.message = f"The file of --record cannot be written ({error.strerror}); try again"
    return refused


@dataclass(slots=True)
class Session:
    """One line of turns. `request` is its name in the engine, for all turns."""

    id: str
    owner: str
    version: Version
    request: RequestId
    seed: int
    used_s: float
    conversation: Conversation = field(default_factory=Conversation)
    busy: bool = False
    opened: bool = False  # by itself, before its first turn

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
