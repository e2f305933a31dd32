"""Responses on their way from the engine to one client.

Lives on the event loop; the engine's thread fills it through a queue. Invariant: when it is closed
nothing of it is left in the engine, except a session that may go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from dora_rl.chat.conversation import Turn
from dora_rl.chat.errors import bad_request, server_error
from dora_rl.chat.requests import Message
from dora_rl.chat.service import Piece
from dora_rl.serve.sessions import Session
from dora_rl.types import Finish, RequestId, Version


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
        self.turn, self._session = turn, session
        self.num_requests = len(requests)
        self._on_close = on_close
        self._running = dict(enumerate(requests))
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._closed = False
        self.reply_known = False

    @property
    def session(self) -> dict[str, Any] | None:
        if self._session is None or self.turn is None:
            return None
        number = self._session.conversation.num_turns + (0 if self.reply_known else 1)
        note: dict[str, Any] = {"id": self._session.id, "continued": self.turn.continued}
        note["turn"] = number if self.turn.continued else 1
        return note | ({"restarted_because": self.turn.why} if self.turn.why else {})

    @property
    def owner(self) -> Session | None:
        return self._session

    def sink(self, piece: Piece) -> None:
        self._queue.put_nowait(piece)

    async def pieces(self) -> AsyncIterator[Piece]:
        while self._running:
            piece = await self._queue.get()
            if piece.finish is not None:
                del self._running[piece.choice]
            if piece.finish is Finish.REFUSED:
                raise bad_request(piece.error)
            if piece.finish is Finish.ERROR:
                raise server_error(piece.error)
            if self._session is not None:
                self._token_ids += piece.token_ids
                self._logprobs += piece.logprobs
            yield piece

    def replied(self, reply: Message) -> None:
        if self._session is not None and self.turn is not None and self._token_ids:
            past = self._session.conversation
            past.add(self.turn, self._token_ids, self._logprobs, reply)
            self.reply_known = True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close(self, list(self._running.values()))
