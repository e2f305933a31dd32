"""`POST /v1/messages`, as Anthropic's clients speak it: requests into ours, answers into theirs.

A request becomes the messages of a chat: `system` the first one, a `tool_use` block a call of the
assistant's, a `tool_result` a message of the role tool. An answer is one block of text, then one
for each call. Invariant: the events of a stream add up to the message of a whole answer, and what a
client gives back of an answer becomes the message that the answer was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dora_rl.chat.bounds import INPUT, MESSAGES, Unfit
from dora_rl.chat.requests import ApiError, Ask, Message, ask_of, bad_request, fields
from dora_rl.types import Finish

if TYPE_CHECKING:
    from dora_rl.chat.answers import Choice

Event = dict[str, Any]
# What an error is called, by its status.
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
NEEDS = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}


def read_messages(data: Mapping[str, object], session_id: str | None) -> Ask:
    """A checked request."""
    known = fields(MESSAGES, data)
    messages: list[Message] = []
    if system := text_of(known.get("system", "")):
        messages.append({"role": "system", "content": system})
    for index, turn in enumerate(known["messages"]):
        messages += list(_messages_of(turn, index))
    if not messages:
        raise bad_request("'messages' must have something in them", "messages")
    none = known.get("tool_choice", {}).get("type") == "none"
    return ask_of(
        known | {"stop": known.get("stop_sequences", [])},
        session_id,
        known["max_tokens"],
        messages=tuple(messages),
        tools=tuple(map(_tool, known.get("tools", []) if not none else [])),
    )


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Of a string or a list of parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _messages_of(turn: dict[str, Any], index: int) -> Iterator[Message]:
    """Results of tools each for itself, and what stands beside them in one message."""
    role, given = turn["role"], turn["content"]
    is_text = isinstance(given, str)
    content: list[dict[str, Any]] = [{"type": "text", "text": given}] if is_text else given
    text, calls = "", list[Message]()
    for place, block in enumerate(content):
        kind, where = block["type"], f"messages[{index}].content[{place}]"
        for name in NEEDS[kind]:
            if name not in block:
                raise bad_request(f"'{where}.{name}' must be there in a block {kind}", "messages")
        if kind == ("tool_result" if role == "assistant" else "tool_use"):
            raise bad_request(f"'{where}.type' must be another: {role} has no {kind}", "messages")
        if kind == "text":
            text += block["text"]
        elif kind == "tool_use":
            calls.append(call_of(block["id"], block["name"], block["input"]))
        else:
            if text:
                yield {"role": role, "content": text}
            text = ""
            said = text_of(block.get("content", ""))
            yield {"role": "tool", "content": said, "tool_call_id": block["tool_use_id"]}
    if calls:
        yield {"role": role, "content": text, "tool_calls": calls}
    elif text or not any(block["type"] == "tool_result" for block in content):
        yield {"role": role, "content": text}


def call_of(call_id: str, name: str, arguments: dict[str, Any]) -> Message:
    """A call as `answers.read_tool_calls` has it."""
    text = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": text}
    return {"id": call_id, "type": "function", "function": function}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """As chat templates want it."""
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def error_body(error: ApiError) -> dict[str, Any]:
    """With the field and the code beside what the API has."""
    said = {"type": KINDS.get(error.status, "invalid_request_error"), "message": error.message}
    return {"type": "error", "error": said | {"param": error.param, "code": error.code}}


def arguments_of(call: Message) -> dict[str, Any]:
    """The input of a block: an object, whatever the model wrote."""
    written = call["function"]["arguments"]
    try:
        return INPUT.read(json.loads(written))
    except (ValueError, RecursionError, Unfit):
        return {"arguments": written}


class MessagesAnswer:
    """An answer in this API's form; `choice` has all the pieces that came."""

    def __init__(self, choice: Choice) -> None:
        self._choice, self._frame = choice, choice.frame
        self._opened = False  # the block of the text

    def reply(self) -> Message:
        message = self._choice.message()
        if "tool_calls" not in message:
            return message
        calls = [
            call_of(call["id"], call["function"]["name"], arguments_of(call))
            for call in message["tool_calls"]
        ]
        return message | {"tool_calls": calls}

    def _message(self, content: list[dict[str, Any]], num_drawn: int) -> dict[str, Any]:
        generation = self._frame.generation
        message: dict[str, Any] = {
            "id": self._frame.id,
            "type": "message",
            "role": "assistant",
            "model": self._frame.ask.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self._choice.prompt_ids), "output_tokens": num_drawn},
            "weight_version": generation.version,
        }
        if generation.session is not None:
            message["session"] = generation.session
        return message

    def _end(self, message: Message) -> dict[str, Any]:
        """Why it ended."""
        stop = self._choice.stream.stop
        if self._choice.finish is Finish.LENGTH:
            reason = "max_tokens"
        elif "tool_calls" in message:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if stop else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop or None}

    def whole(self) -> dict[str, Any]:
        message = self._choice.message()
        calls = message.get("tool_calls", [])
        content = [{"type": "text", "text": message["content"]}]
        blocks = [_block(call) | {"input": arguments_of(call)} for call in calls]
        content = [*(content if message["content"] or not calls else []), *blocks]
        return self._message(content, len(self._choice.token_ids)) | self._end(message)

    def events(self) -> Iterator[Event]:
        """Of the newest piece."""
        choice = self._choice
        if choice.num_pieces == 1:
            yield {"type": "message_start", "message": self._message([], 0)}
        text = choice.new_text()
        message = choice.message() if choice.finish is not None else None
        if not self._opened and (text or (message is not None and "tool_calls" not in message)):
            self._opened = True
            yield _opens(0, {"type": "text", "text": ""})
        if text:
            yield _goes_on(0, {"type": "text_delta", "text": text})
        if message is None:
            return
        if self._opened:
            yield {"type": "content_block_stop", "index": 0}
        for index, call in enumerate(message.get("tool_calls", []), int(self._opened)):
            yield _opens(index, _block(call))
            text = json.dumps(arguments_of(call), ensure_ascii=False)
            yield _goes_on(index, {"type": "input_json_delta", "partial_json": text})
            yield {"type": "content_block_stop", "index": index}
        usage = {"output_tokens": len(choice.token_ids)}
        yield {"type": "message_delta", "delta": self._end(message), "usage": usage}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Iterator[Event]:
        """In the middle of a stream."""
        yield error_body(error)


def _block(call: Message) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _opens(index: int, block: dict[str, Any]) -> Event:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _goes_on(index: int, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": delta}
