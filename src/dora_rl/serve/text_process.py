"""A process that reads what clients wrote, so that the event loop need not; and its frames.

It answers one question after the other over a socket: a name and arguments in, a value or an error
out, each a length and so many bytes of MessagePack. It has a tokenizer and nothing that is secret,
and may use so much memory; whoever asks may kill it at any time. Invariant: a question is answered
by exactly one frame, or the process is gone; it ends when its socket does.

    python -P -m dora_rl.serve.text_process FD
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dora_rl.chat.conversation import ChatTemplate
from dora_rl.chat.requests import ApiError, Ask, text_too_costly
from dora_rl.chat.texts import PlainTexts
from dora_rl.setup.tokenizer import open_tokenizer

LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 1 << 30
ALARM_S = 2  # later than the deadline of whoever asks
READ, PROMPT, NEXT = "read", "prompt_ids", "next_ids"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What such a process is started with, in its first frame."""

    model: str
    chat_template: str | None = None
    client_templates: bool = False
    chars_max: int = 1 << 24
    memory_bytes_max: int = 2 << 30  # beyond what it has when it begins
    text_s_max: float = 20.0  # for one question


class Answer(msgspec.Struct, array_like=True):
    """One of `ask`, `ids` (None: no such) and an error counts."""

    ask: Ask | None = None
    ids: tuple[int, ...] | None = None
    status: int = 0
    message: str = ""
    param: str | None = None
    code: str | None = None


def frame(value: Any) -> bytes:
    body = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(body)) + body


async def answer(texts: PlainTexts, question: list[Any]) -> Answer:
    name, *arguments = question
    try:
        if name == READ:
            return Answer(ask=await texts.read(*arguments))
        if name == PROMPT:
            return Answer(ids=await texts.prompt_ids(*arguments))
        return Answer(ids=await texts.next_ids(*arguments))
    except ApiError as error:
        return Answer(None, None, error.status, error.message, error.param, error.code)
    except MemoryError:
        error = text_too_costly("needs too much memory")
        return Answer(None, None, error.status, error.message, error.param, error.code)


def main(number: int) -> None:
    with socket.socket(fileno=number) as peer, peer.makefile("rwb") as stream:
        options = msgspec.msgpack.decode(_receive(stream) or b"", type=TextOptions)
        tokenizer = open_tokenizer(Path(options.model), False)
        template = ChatTemplate(tokenizer, options.chat_template, options.chars_max)
        texts = PlainTexts(template, client_templates=options.client_templates)
        _warm_up(template)
        _limit_memory(options.memory_bytes_max)
        _send(stream, Answer())
        while (body := _receive(stream)) is not None:
            # Ends the process, where whoever would kill it has been killed itself.
            signal.alarm(int(options.text_s_max) + ALARM_S)
            _send(stream, asyncio.run(answer(texts, msgspec.msgpack.decode(body))))
            signal.alarm(0)


def _warm_up(template: ChatTemplate) -> None:
    """Whatever is imported at the first use."""
    if template.text:
        try:
            template.prompt_ids([{"role": "user", "content": "a"}], (), {})
        except ApiError:
            return  # a template that wants other messages has been imported for, too


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        most = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _receive(stream: Any) -> bytes | None:
    """The next frame; None: the other side has closed."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def _send(stream: Any, value: Answer) -> None:
    stream.write(frame(value))
    stream.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
