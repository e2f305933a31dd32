"""`POST /v1/responses` of the OpenAI API: requests into those of a chat, answers into items.

Nothing is stored, so a request brings its whole input. A `function_call` item is a call of the
assistant's message before it, a `function_call_output` a message of the role tool. An answer is an
item with the text, where there is any, and one for each call. Invariant: the events of a stream add
up to the response of a whole answer, and the items that a client gives back become the message that
the answer was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dora_rl.chat.bounds import RESPONSES
from dora_rl.chat.messages_api import text_of
from dora_rl.chat.requests import ApiError, Ask, Message, ask_of, bad_request, fields
from dora_rl.types import Finish

if TYPE_CHECKING:
    from dora_rl.chat.answers import Choice

Event = dict[str, Any]
NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


def read_response(data: Mapping[str, object], session_id: str | None) -> Ask:
    """A checked request."""
    known = fields(RESPONSES, data)
    given = known["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[Message] = []
    if instructions := known.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    tools = known.get("tools", []) if known.get("tool_choice") != "none" else []
    limit = known.get("max_output_tokens")
    ask = ask_of(known, session_id, limit, messages=tuple(messages), tools=tuple(map(_tool, tools)))
    return replace(ask, num_samples=1)


def _add_item(messages: list[Message], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    for name in NEEDS[kind]:
        if name not in item:
            raise bad_request(f"'{where}.{name}' must be there in an item {kind}", "input")
    if kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": text_of(item["content"])})
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1] = messages[-1] | {
            "tool_calls": [*messages[-1].get("tool_calls", []), call],
        }
    else:
        said = text_of(item["output"])
        messages.append({"role": "tool", "content": said, "tool_call_id": item["call_id"]})


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """As chat templates want it."""
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


class ResponsesAnswer:
    """An answer in this API's form; `choice` has all the pieces that came."""

    def __init__(self, choice: Choice) -> None:
        self._choice, self._frame = choice, choice.frame
        self._number = 0  # of the next event
        self._opened = False  # the item of the text

    def reply(self) -> Message:
        return self._choice.message()

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        ask, generation = self._frame.ask, self._frame.generation
        body: dict[str, Any] = {
            "id": self._frame.id,
            "object": "response",
            "created_at": self._frame.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": ask.model,
            "output": items,
            "max_output_tokens": ask.tokens_max,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": ask.params.temperature,
            "top_p": ask.params.top_p,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [
                {"type": "function", "strict": None} | tool["function"] for tool in ask.tools
            ],
            "truncation": "disabled",
            "usage": None,
            "weight_version": generation.version,
        }
        if generation.session is not None:
            body["session"] = generation.session
        return body

    def _ended(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """With why it ended, and the counts."""
        cut = self._choice.finish is Finish.LENGTH
        num_prompt, num_drawn = len(self._choice.prompt_ids), len(self._choice.token_ids)
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_drawn,
        }
        body = self._response("incomplete" if cut else "completed", items) | {"usage": usage}
        return body | ({"incomplete_details": {"reason": "max_output_tokens"}} if cut else {})

    def _text_item(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{self._frame.id}", "type": "message", "role": "assistant"}
        return head | {"status": status, "content": parts}

    def _items(self, message: Message) -> list[dict[str, Any]]:
        status = "incomplete" if self._choice.finish is Finish.LENGTH else "completed"
        calls = message.get("tool_calls", [])
        text = [self._text_item(status, [_part(message["content"])])]
        called = [_call_item(call, status, call["function"]["arguments"]) for call in calls]
        return [*(text if message["content"] or not calls or self._opened else []), *called]

    def whole(self) -> dict[str, Any]:
        return self._ended(self._items(self._choice.message()))

    def events(self) -> Iterator[Event]:
        """Of the newest piece, each with its number."""
        yield from self._numbered(self._events())

    def _numbered(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            yield event | {"sequence_number": self._number}
            self._number += 1

    def _begins(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response("in_progress", [])}

    def _events(self) -> Iterator[Event]:
        choice = self._choice
        if choice.num_pieces == 1:
            yield from self._begins()
        text = choice.new_text()
        message = choice.message() if choice.finish is not None else None
        if text or (message is not None and "tool_calls" not in message):
            yield from self._text_opens()
        at = {"item_id": f"msg_{self._frame.id}", "output_index": 0, "content_index": 0}
        if text:
            yield {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []}
        if message is None:
            return
        items = self._items(message)
        if self._opened:
            done = message["content"]
            yield {"type": "response.output_text.done", **at, "text": done, "logprobs": []}
            yield {"type": "response.content_part.done", **at, "part": _part(done)}
            yield {"type": "response.output_item.done", "output_index": 0, "item": items[0]}
        for index, item in enumerate(items):
            if item["type"] == "function_call":
                yield from _call_events(index, item)
        ended = self._ended(items)
        yield {"type": f"response.{ended['status']}", "response": ended}

    def _text_opens(self) -> Iterator[Event]:
        if self._opened:
            return
        self._opened = True
        item = self._text_item("in_progress", [])
        yield {"type": "response.output_item.added", "output_index": 0, "item": item}
        at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        yield {"type": "response.content_part.added", **at, "part": _part("")}

    def failed(self, error: ApiError) -> Iterator[Event]:
        """In the middle of a stream; before anything else the response begins, as clients expect
        it to."""
        if not self._number:
            yield from self._numbered(self._begins())
        said = {"code": error.code, "message": error.message, "param": error.param}
        yield from self._numbered([{"type": "error", **said}])


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Message, status: str, arguments: str) -> dict[str, Any]:
    """An item of its own, beside the id by which its output names it."""
    head = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
    return head | {"name": call["function"]["name"], "arguments": arguments, "status": status}


def _call_events(index: int, item: dict[str, Any]) -> Iterator[Event]:
    begun = item | {"arguments": "", "status": "in_progress"}
    at = {"item_id": item["id"], "output_index": index}
    arguments = item["arguments"]
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
    done = {"arguments": arguments, "name": item["name"]}
    yield {"type": "response.function_call_arguments.done", **at, **done}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
