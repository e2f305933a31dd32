"""The memory of a session: messages as the client saw them, ids as the model made them.

Pure. Invariant: `token_ids` is what the model read and wrote, in order, never made from text again;
`loss_mask` is 1 exactly where the model wrote. A request whose messages do not begin with the
messages of the session starts it again from its own messages, and says why.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from dora_rl.chat.requests import Message
from dora_rl.chat.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Turn:
    """What the next response starts from. `prompt_ids` is everything, `new_ids` its new end.

    `continued` is False for a first turn and for a fresh start, whose reason is `why`.
    """

    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    continued: bool
    why: str = ""


@dataclass(slots=True)
class Conversation:
    """One session's past. The response begins after the ids of the first prompt."""

    messages: list[Message] = field(default_factory=list[Message])
    prompt_ids: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    loss_mask: list[int] = field(default_factory=list[int])
    num_turns: int = 0

    def next_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        options: dict[str, Any],
        template: ChatTemplate,
        end_ids: Collection[int],
    ) -> Turn:
        """Continue with the ids that are here where the messages allow it, else start afresh."""
        why = self._difference(messages)
        if not why and self.num_turns:
            known = len(self.messages)
            before, after = messages[: known - 1], messages[known:]
            last = self.token_ids[-1]
            new = template.next_ids(before, after, tools, options, last, end_ids)
            if new:
                ids = (*self.prompt_ids, *self.token_ids, *new)
                return Turn(tuple(messages), ids, new, True)
            why = "the chat template does not keep the replies apart"
        ids = template.prompt_ids(messages, tools, options)
        return Turn(tuple(messages), ids, ids, False, why)

    def add(
        self, turn: Turn, token_ids: Sequence[int], logprobs: Sequence[float], reply: Message
    ) -> None:
        """A turn has ended with `reply`, which the client has seen."""
        if turn.continued:
            self.token_ids += turn.new_ids
            self.logprobs += [0.0] * len(turn.new_ids)
            self.loss_mask += [0] * len(turn.new_ids)
            self.num_turns += 1
        else:
            self.prompt_ids = turn.prompt_ids
            self.token_ids, self.logprobs, self.loss_mask = [], [], []
            self.num_turns = 1
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.loss_mask += [1] * len(token_ids)
        self.messages = [*turn.messages, reply]

    def _difference(self, messages: Sequence[Message]) -> str:
        """Where the messages leave the session's, or an empty string."""
        for index, (mine, given) in enumerate(zip(self.messages, messages, strict=False)):
            if mine != given:
                return f"message {index} is not the one of this session"
        if self.num_turns and len(messages) <= len(self.messages):
            return "the messages do not go on after the last reply"
        if self.num_turns and messages[len(self.messages)]["role"] == "assistant":
            return "an assistant message follows the last reply"
        return ""
