"""Random answers in the other APIs' forms: a stream adds up to the whole answer, and what a client
gives back of it is the message that was replied."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dora_rl.chat.answers import Choice, Frame
from dora_rl.chat.messages_api import MessagesAnswer, read_messages
from dora_rl.chat.requests import ask_of
from dora_rl.chat.responses_api import ResponsesAnswer, read_response
from dora_rl.chat.service import Piece
from dora_rl.types import Finish

TOOL = {"type": "function", "function": {"name": "f"}}
# Calls, what is nearly one, stop strings, and characters that pieces cut in two.
WORDS = [
    *(b"<tool_call>", b"</tool_call>", b"<tool", b"STOP", b"  ", b"\n", b"x", b"\xff\xe6"),
    *(b'{"name": "f"}', b'{"name":"g"}', b'{"name": "f", "arguments": {"a": 1}}', b"\xf0\x9d"),
    *("é日".encode(), "𝄞".encode(), b'{"name":"f","arguments":"{\\"a\\":1}"}'),
]


class Bytes:
    def decode(self, ids: Any, **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


class Written:
    version, session, prompts = 1, None, ((1, 2),)


def answered(draw: random.Random, form: Callable[[Choice], Any]) -> tuple[list[Any], Any]:
    """The events of a random text in random pieces, and the form at its end."""
    text = b"".join(draw.choices(WORDS, k=draw.randint(1, 7)))
    stops = draw.choice([[], ["STOP"], ["x", "</"]])
    ask = replace(ask_of({"model": "m", "stream": True, "stop": stops}, None, 9), tools=(TOOL,))
    frame = Frame("id_1", 0, ask, Written(), Bytes(), True, (TOOL,))  # type: ignore[arg-type]
    answer = form(choice := Choice(frame, 0))
    finish, events, at = draw.choice([Finish.STOP, Finish.LENGTH]), [], 0
    while at < len(text):
        part = text[at : at + draw.randint(1, 6)]
        at += len(part)
        last = finish if at == len(text) else None
        choice.add(Piece(0, tuple(part), (0.0,) * len(part), finish=last))
        events += answer.events()
    return events, answer


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a client adds them up."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            blocks[-1]["json"] += delta.get("partial_json", "")
            if "text" in delta:
                blocks[-1]["text"] += delta["text"]
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return blocks


def test_messages() -> None:
    for seed in range(1500):
        events, answer = answered(random.Random(seed), MessagesAnswer)
        blocks, whole = blocks_of(events), answer.whole()
        assert blocks == whole["content"], seed
        said = [{"role": "assistant", "content": blocks}]
        back = read_messages({"model": "m", "max_tokens": 1, "messages": said}, None)
        assert back.messages == (answer.reply(),), seed
        assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]


def test_responses() -> None:
    for seed in range(1500):
        events, answer = answered(random.Random(seed), ResponsesAnswer)
        items = events[-1]["response"]["output"]
        assert items == answer.whole()["output"], seed
        added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
        assert added == [item["id"] for item in items], seed
        deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        parts = [part["text"] for item in items for part in item.get("content", [])]
        assert "".join(deltas) == "".join(parts), seed
        assert read_response({"model": "m", "input": items}, None).messages == (answer.reply(),)
