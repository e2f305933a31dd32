"""What is done to clients' text: bodies are read and checked, templates rendered, tokens made.

`Texts` is asked by the front and the services; it may do the work elsewhere, so every method is
awaited. `PlainTexts` does it on the spot: for the endpoint of agents, whose clients are the user's
own, inside of `serve`'s text processes, and as their oracle. Invariant: what comes back is within
the table of bounds and no longer than `chars_max` allows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dora_rl.chat.bounds import CHAT, COMPLETION, MESSAGES
from dora_rl.chat.conversation import ChatTemplate, Conversation, Turn
from dora_rl.chat.messages_api import read_messages
from dora_rl.chat.requests import Ask, Message, parsed, read_chat, read_completion
from dora_rl.chat.responses_api import read_response


class Texts(Protocol):
    """Every method may raise `ApiError`."""

    async def read(self, endpoint: str, body: bytes, session_id: str | None) -> Ask:
        """A checked request. `prompts` is there but in a session, whose history it depends on."""
        ...

    async def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any], options: dict[str, Any]
    ) -> tuple[int, ...]: ...

    async def next_ids(
        self,
        before: Sequence[Message],
        after: Sequence[Message],
        tools: Sequence[Any],
        options: dict[str, Any],
        last_id: int,
        end_ids: Collection[int],
    ) -> tuple[int, ...] | None:
        """See `ChatTemplate.next_ids`."""
        ...


class PlainTexts:
    """Implements `Texts` here and now. `reads_prompts`: whoever asks wants `Ask.prompts`."""

    def __init__(
        self, template: ChatTemplate, *, client_templates: bool = False, reads_prompts: bool = True
    ) -> None:
        self._template = template
        self._client_templates, self._reads_prompts = client_templates, reads_prompts

    async def read(self, endpoint: str, body: bytes, session_id: str | None) -> Ask:
        data = parsed(body)
        if endpoint != COMPLETION:
            if endpoint == CHAT:
                ask = read_chat(data, session_id, self._client_templates)
            else:
                ask = (read_messages if endpoint == MESSAGES else read_response)(data, session_id)
            if ask.session_id is not None or not self._reads_prompts:
                return ask
            ids = self._template.prompt_ids(ask.messages, ask.tools, ask.template_options)
            return replace(ask, prompts=(ids,))
        ask, prompts = read_completion(data, session_id)
        read = [self._template.encode(one) if isinstance(one, str) else one for one in prompts]
        return replace(ask, prompts=tuple(read))

    async def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any], options: dict[str, Any]
    ) -> tuple[int, ...]:
        return self._template.prompt_ids(messages, tools, options)

    async def next_ids(
        self,
        before: Sequence[Message],
        after: Sequence[Message],
        tools: Sequence[Any],
        options: dict[str, Any],
        last_id: int,
        end_ids: Collection[int],
    ) -> tuple[int, ...] | None:
        return self._template.next_ids(before, after, tools, options, last_id, end_ids)


async def next_turn(
    past: Conversation, ask: Ask, options: dict[str, Any], texts: Texts, end_ids: Collection[int]
) -> Turn:
    """The turn of a session that a request asks for: it goes on where the messages allow it."""
    around = past.around_reply(ask.messages)
    new = None
    if around is not None:
        new = await texts.next_ids(*around, ask.tools, options, past.token_ids[-1], end_ids)
    whole = None if new else await texts.prompt_ids(ask.messages, ask.tools, options)
    return past.turn(ask.messages, new, whole)
