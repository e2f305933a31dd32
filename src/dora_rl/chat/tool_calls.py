"""Tool calls in what a model wrote: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

That is the form of Hermes and Qwen templates; other models' calls stay text. Pure. Invariant: a
block that is not a well-formed call of an offered tool is text like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from dora_rl.chat.requests import Message

OPEN = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def read_tool_calls(text: str, tools: Collection[dict[str, Any]], prefix: str) -> Message:
    """The assistant's message: the text before the first call, and the calls.

    >>> tools = [{"type": "function", "function": {"name": "add"}}]
    >>> written = 'so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    >>> message = read_tool_calls(written, tools, "call")
    >>> message["content"], message["tool_calls"][0]["function"]
    ('so', {'name': 'add', 'arguments': '{"a": 1}'})
    """
    names = {tool.get("function", {}).get("name") for tool in tools}
    calls: list[Message] = []
    for match in _BLOCK.finditer(text) if tools else ():
        call = _call(match.group(1), names)
        if call is not None:
            text = text if calls else text[: match.start()]
            calls.append({"id": f"{prefix}_{len(calls)}", "type": "function", "function": call})
    message: Message = {"role": "assistant", "content": text}
    return message | ({"tool_calls": calls} if calls else {})


def _call(block: str, names: Collection[object]) -> dict[str, str] | None:
    try:
        call = json.loads(block)
    except ValueError:
        return None
    if not isinstance(call, dict) or call.get("name") not in names:
        return None
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": call["name"], "arguments": text}
