"""The memory of a session: messages as the client saw them, ids as the model made them.

Pure. Invariant: `token_ids` is what the model read and wrote, in order, never made from text again;
`loss_mask` is 1 exactly where the model wrote. A request whose messages do not begin with the
messages of the session starts it again from its own messages, and says why.

Messages become ids through the model's own chat template, and what a model wrote is never tokenised
again. For the next turn only the text *around* the reply is rendered: the reply is replaced by a
mark, and what the template puts after the mark is tokenised alone and appended to the ids the model
generated.

    template:  …<|im_start|>assistant\\n MARK <|im_end|>\\n<|im_start|>user\\nnext…assistant\\n
    kept ids:  …the ids as they were generated, up to and with the end-of-turn id
    appended:                                    \\n<|im_start|>user\\nnext…assistant\\n
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from dora_rl.chat.requests import Message, bad_request, text_too_costly
from dora_rl.model.tokenizer import Tokenizer


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

    def around_reply(
        self, messages: Sequence[Message]
    ) -> tuple[Sequence[Message], Sequence[Message]] | None:
        """What stands before and after the last reply, where the messages go on from it."""
        if not self.num_turns or self._difference(messages):
            return None
        known = len(self.messages)
        return messages[: known - 1], messages[known:]

    def turn(
        self,
        messages: Sequence[Message],
        new: tuple[int, ...] | None,
        whole: tuple[int, ...] | None,
    ) -> Turn:
        """Go on with the ids that are here and `new` ones, else start afresh with `whole`."""
        if new:
            ids = (*self.prompt_ids, *self.token_ids, *new)
            return Turn(tuple(messages), ids, new, True)
        assert whole is not None
        why = self._difference(messages)
        if not why and self.num_turns:
            why = "the chat template does not keep the replies apart"
        return Turn(tuple(messages), whole, whole, False, why)

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


MARK = "DORAreplyMARK7f3a9"
REASON_CHARS = 200  # of what a template says: it may repeat the whole conversation


class ChatTemplate:
    """A tokenizer and the template it uses: its own, or `source` in its place. `chars_max`: the
    longest text that is tokenised; longer ones are refused, as tokenising takes its time."""

    def __init__(
        self, tokenizer: Tokenizer, source: str | None = None, chars_max: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._source, self._chars_max = source, chars_max

    @property
    def text(self) -> str:
        """The template itself, or an empty string."""
        own = self._source or getattr(self.tokenizer, "chat_template", None)
        return own if isinstance(own, str) else json.dumps(own) if own else ""

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any], options: dict[str, Any]
    ) -> tuple[int, ...]:
        """The whole conversation, ready for the model's next words."""
        return self._encode(self._render(messages, tools, options), False)

    def encode(self, text: str) -> tuple[int, ...]:
        """The prompt of a completion, as it is."""
        return self._encode(text, True)

    def next_ids(
        self,
        before: Sequence[Message],
        after: Sequence[Message],
        tools: Sequence[Any],
        options: dict[str, Any],
        last_id: int,
        end_ids: Collection[int],
    ) -> tuple[int, ...] | None:
        """What follows a reply that stands between `before` and `after`; None: cannot be told.

        A reply that ended with the template's own end-of-turn id does not get it twice; one that
        was cut off by a limit gets it here.
        """
        marked = [*before, {"role": "assistant", "content": MARK}, *after]
        text = self._render(marked, tools, options)
        if text.count(MARK) != 1:
            return None
        ids = self._encode(text.partition(MARK)[2], False)
        return ids[1:] if ids and ids[0] == last_id and last_id in end_ids else ids

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        most = self._chars_max
        if most is not None and len(text) > most:
            raise text_too_costly(f"has {len(text)} characters; with this context, {most} at most")
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=special))
        except (UnicodeError, TypeError) as error:
            raise bad_request(f"the messages cannot be tokenised ({error})", "messages") from None

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any], options: dict[str, Any]
    ) -> str:
        if not self.text and "chat_template" not in options:
            raise bad_request(
                "this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                "messages",
            )
        prefilled = messages[-1]["role"] == "assistant"
        options = ({"chat_template": self._source} if self._source else {}) | options
        try:
            return self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=not prefilled,
                continue_final_message=prefilled,
                **options,
            )
        except MemoryError:
            raise  # for whoever set the limit
        except Exception as error:  # noqa: BLE001  the template is the model author's program
            line = " ".join(str(error).split()) or type(error).__name__
            message = f"the chat template refused the messages ({line[:REASON_CHARS]})"
            raise bad_request(message, "messages") from None


def _for_template(message: Message) -> Message:
    """Templates want the arguments of a tool call as an object."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            arguments = function["arguments"]
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}
