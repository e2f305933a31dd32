"""The seam between the HTTP front and whoever generates: an engine, or a training run.

Never does anything itself. Invariant: every piece of a generation was made by the one `version`
that the generation names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Protocol

from dora_rl.chat.conversation import ChatTemplate
from dora_rl.chat.requests import Ask, Message
from dora_rl.chat.texts import Texts
from dora_rl.types import Finish, Version


class Piece(NamedTuple):
    """New tokens of one response; `finish` with the last ones."""

    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: Finish | None = None
    error: str = ""


class Generation(Protocol):
    """Responses on their way. Response i belongs to prompt i // num_samples."""

    @property
    def version(self) -> Version: ...
    @property
    def prompts(self) -> Sequence[tuple[int, ...]]: ...
    @property
    def session(self) -> dict[str, Any] | None:
        """What the answer says of the session: id, turn, whether it continued, else why not."""
        ...

    def pieces(self) -> AsyncIterator[Piece]:
        """Ends after the last response is complete; raises `ApiError` when one failed."""
        ...

    def replied(self, reply: Message) -> None:
        """The message the client gets: a session continues from it."""
        ...

    def close(self) -> None:
        """Give up what is not complete. Harmless after the end."""
        ...


class Service(Protocol):
    """What an endpoint needs. Every method may raise `ApiError`. `owner` is whose key a request
    came with: a session is there for the key that made it, and for nobody else."""

    @property
    def template(self) -> ChatTemplate: ...
    @property
    def texts(self) -> Texts: ...
    def models(self) -> list[dict[str, Any]]: ...
    def healthy(self) -> bool: ...
    async def chat(self, ask: Ask) -> Generation: ...
    async def complete(self, ask: Ask) -> Generation: ...
    def open_session(self, session_id: str | None, owner: str) -> dict[str, Any]: ...
    def read_session(self, session_id: str, owner: str) -> dict[str, Any]: ...
    async def end_session(
        self, session_id: str, owner: str, reward: float | None
    ) -> dict[str, Any]: ...
