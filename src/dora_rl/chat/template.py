"""Messages to token ids through the model's own chat template.

Never re-tokenises what a model wrote. For the next turn of a conversation only the text *around*
the reply is rendered: the reply is replaced by a mark, and what the template puts after the mark
is tokenised alone and appended to the ids the model generated.

    template:  …<|im_start|>assistant\\n MARK <|im_end|>\\n<|im_start|>user\\nnext…assistant\\n
    kept ids:  …the ids as they were generated, up to and with the end-of-turn id
    appended:                                    \\n<|im_start|>user\\nnext…assistant\\n

Invariant: ids given out for a next turn begin with the ids of the turns before, unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from dora_rl.chat.errors import bad_request
from dora_rl.chat.requests import Message
from dora_rl.model.tokenizer import Tokenizer

MARK = "DORAreplyMARK7f3a9"


class ChatTemplate:
    """A tokenizer and the template it uses: its own, or `source` in its place."""

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._source = source

    @property
    def text(self) -> str:
        """The template itself, or an empty string."""
        own = self._source or getattr(self.tokenizer, "chat_template", None)
        return own if isinstance(own, str) else json.dumps(own) if own else ""

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any], options: dict[str, Any]
    ) -> tuple[int, ...]:
        """The whole conversation, ready for the model's next words."""
        return self._encode(self._render(messages, tools, options))

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
        ids = self._encode(text.partition(MARK)[2])
        return ids[1:] if ids and ids[0] == last_id and last_id in end_ids else ids

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        except (UnicodeError, TypeError) as error:
            raise bad_request(f"the messages cannot be tokenised ({error})", "messages") from None

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any], options: dict[str, Any]
    ) -> str:
        if not self.text:
            raise bad_request(
                "this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                "messages",
            )
        prefilled = messages[-1]["role"] == "assistant"
        options = options | ({"chat_template": self._source} if self._source else {})
        try:
            return self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=not prefilled,
                continue_final_message=prefilled,
                **options,
            )
        except Exception as error:  # noqa: BLE001  the template is the model author's program
            line = " ".join(str(error).split()) or type(error).__name__
            message = f"the chat template refused the messages ({line})"
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
        except ValueError:
            arguments = function["arguments"]
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}
