"""Answers in the API's shapes, whole or in chunks, from the pieces of a generation.

Beside the usual fields every answer and every chunk carries `weight_version`, and `session` where
there is one; with `return_token_ids` also `prompt_token_ids` and `token_ids`, as vLLM names them.
Text comes out without half characters and without the stop string. Tool calls are read in the form
of Hermes and Qwen templates, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; other
models' calls stay text. Invariants: chunks of a choice add up to the same choice in a whole answer;
the pieces of a response add up to the decoded response, cut at the stop string that is complete
first (of several that come with one piece, the one that begins first); a block that is not a
well-formed call of an offered tool is text like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from dora_rl.chat.bounds import INPUT, Unfit
from dora_rl.chat.requests import Ask, Message
from dora_rl.chat.service import Generation, Piece
from dora_rl.model.tokenizer import Tokenizer
from dora_rl.types import Finish

LOGPROB_MIN = -9999.0  # JSON has no infinity; a token that top_p or top_k shut out has this


@dataclass(frozen=True, slots=True)
class Frame:
    """What every choice of one answer shares."""

    id: str
    created: int
    ask: Ask
    generation: Generation
    tokenizer: Tokenizer
    chat: bool
    tools: tuple[dict[str, Any], ...] = ()  # those whose calls are read from the text
    words: dict[int, str] = field(default_factory=dict[int, str])  # tokens decoded alone

    def word(self, token: int) -> str:
        if token not in self.words:
            self.words[token] = self.tokenizer.decode([token])
        return self.words[token]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def body(self, choices: list[dict[str, Any]], chunk: bool = False) -> dict[str, Any]:
        """The outer object."""
        name = "chat.completion" if self.chat else "text_completion"
        version = self.generation.version
        body: dict[str, Any] = {
            "id": self.id,
            "object": f"{name}.chunk" if chunk and self.chat else name,
            "created": self.created,
            "model": self.ask.model,
            "system_fingerprint": f"version-{version}",
            "weight_version": version,
            "choices": choices,
        }
        if self.generation.session is not None:
            body["session"] = self.generation.session
        return body

    def usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        num_prompt = sum(len(ids) for ids in self.generation.prompts)
        num_drawn = sum(len(choice.token_ids) for choice in choices)
        if self.ask.echo:
            num_drawn -= num_prompt * self.ask.num_samples
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_drawn}
        return counts | {"total_tokens": num_prompt + num_drawn}


@dataclass(slots=True)
class Choice:
    """One response as it grows."""

    frame: Frame
    index: int
    stream: TextStream = field(init=False)
    token_ids: list[int] = field(default_factory=list[int])
    num_pieces: int = 0
    # Log-probs of an answer that is not streamed, as JSON: they are many times the text, so each
    # piece's are written when it comes, and not all at the end while everybody else waits.
    written: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    finish: Finish | None = None
    num_shown: int = 0  # characters that chunks have given out
    word_at: int = 0  # where the next token of a chunk begins, counted in token texts

    def __post_init__(self) -> None:
        ask = self.frame.ask
        self.stream = TextStream(self.frame.decode, ask.params.stop_strings)

        if ask.echo:
            self._begin_with_prompt()

    def _begin_with_prompt(self) -> None:
        """Its first token comes after nothing; all others come with the pieces."""
        first = self.prompt_ids[0]
        self.token_ids.append(first)
        if self.frame.ask.logprobs:
            word = self.frame.word(first)
            texts = (("tokens", json.dumps(word, ensure_ascii=False)), ("token_logprobs", "null"))
            self.written = {name: [text] for name, text in texts}
            self.written |= {"top_logprobs": ["null"], "text_offset": ["0"]}
            self.word_at = len(word)

    def add(self, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        self.num_pieces += 1
        self.finish = piece.finish
        if self.frame.ask.stream:
            self.stream.push(piece.token_ids)
        else:
            self._write_logprobs(piece)
            if piece.finish is not None:  # one decoding is enough
                self.stream.push(self.token_ids)
        if piece.finish is not None:
            self.stream.finish()

    @property
    def text(self) -> str:
        return self.stream.text

    @property
    def prompt_ids(self) -> list[int]:
        at = self.index // self.frame.ask.num_samples
        return list(self.frame.generation.prompts[at])

    def message(self) -> Message:
        prefix = f"call_{re.split('[-_]', self.frame.id)[-1]}_{self.index}"
        return read_tool_calls(self.text, self.frame.tools, prefix)

    def finish_reason(self, message: Message | None = None) -> str | None:
        if self.finish is None:
            return None
        calls = message is not None and "tool_calls" in message
        return "tool_calls" if calls and self.finish is Finish.STOP else str(self.finish)

    def whole(self) -> str:
        """The entry of an answer that is not streamed, as JSON."""
        body: dict[str, Any] = {"index": self.index}
        if self.frame.chat:
            message = self.message()
            reason = self.finish_reason(message)
            body |= {"message": message | {"refusal": None}, "finish_reason": reason}
            if "tool_calls" in message and not message["content"]:
                body["message"]["content"] = None
        else:
            body |= {"text": self.text, "finish_reason": self.finish_reason()}
        text = json.dumps(body | self._ids(self.token_ids, first=True), ensure_ascii=False)
        return f'{text[:-1]}, "logprobs": {self._written_logprobs()}}}'

    def _write_logprobs(self, piece: Piece) -> None:
        if self.frame.ask.logprobs:
            for name, entries in self._logprobs(piece).items():
                texts = self.written.setdefault(name, [])
                if entries:
                    texts.append(json.dumps(entries, ensure_ascii=False)[1:-1])

    def _written_logprobs(self) -> str:
        if not self.frame.ask.logprobs:
            return "null"
        lists = [f'"{name}": [{", ".join(texts)}]' for name, texts in self.written.items()]
        if self.frame.chat:
            lists.append('"refusal": null')
        return f"{{{', '.join(lists)}}}"

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The entry of a chunk; `add` has seen the piece already."""
        body: dict[str, Any] = {"index": self.index}
        first = self.num_pieces == 1
        if self.frame.chat:
            body["delta"], body["finish_reason"] = self._delta(first)
        else:
            body |= {"text": self._shown(len(self.text)), "finish_reason": self.finish_reason()}
        body["logprobs"] = None
        if self.frame.ask.logprobs:
            refusal = {"refusal": None} if self.frame.chat else {}
            body["logprobs"] = self._logprobs(piece) | refusal
        return body | self._ids(piece.token_ids, first)

    def _delta(self, first: bool) -> tuple[dict[str, Any], str | None]:
        """Text that may be the beginning of a tool call is held back until it is known."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        delta["content"] = self.new_text()
        if self.finish is None:
            return delta, None
        message = self.message()
        if "tool_calls" in message:
            calls = enumerate(message["tool_calls"])
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
        return delta, self.finish_reason(message)

    def new_text(self) -> str:
        """Of a chat's message: what is certain of it and was not given out before."""
        if self.finish is not None:
            return self.message()["content"][self.num_shown :]
        marks = (OPEN,) if self.frame.tools else ()
        return self._shown(clear_of(self.text, marks)[0])

    def _shown(self, end: int) -> str:
        start, self.num_shown = self.num_shown, max(self.num_shown, end)
        return self.text[start : self.num_shown]

    def _ids(self, token_ids: Sequence[int], first: bool) -> dict[str, Any]:
        """Completions have their prompt's ids in the choice, chats in the answer."""
        if not self.frame.ask.return_token_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": list(token_ids)}
        return ids | (
            {"prompt_token_ids": self.prompt_ids} if first and not self.frame.chat else {}
        )

    def _logprobs(self, piece: Piece) -> dict[str, list[Any]]:
        """The lists that those of all pieces add up to."""
        top = piece.top_logprobs or ((),) * len(piece.token_ids)
        rows = list(zip(piece.token_ids, piece.logprobs, top, strict=True))
        if self.frame.chat:
            entry = self._entry
            content = [
                entry(token, logprob) | {"top_logprobs": [entry(*other) for other in others]}
                for token, logprob, others in rows
            ]
            return {"content": content}
        word = self.frame.word
        tokens = [word(token) for token in piece.token_ids]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self.word_at)
            self.word_at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(logprob, LOGPROB_MIN) for logprob in piece.logprobs],
            "top_logprobs": [
                {word(other): max(value, LOGPROB_MIN) for other, value in others}
                for _, _, others in rows
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        word = self.frame.word(token)
        value = max(logprob, LOGPROB_MIN)
        return {"token": word, "logprob": value, "bytes": list(word.encode())}


BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that end too early
WINDOW = 16  # tokens decoded again with each piece, so that spaces and joins come out right


class TextStream:
    """`push` returns what is certain by now; `finish` the rest."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._start = 0  # of the ids still decoded again
        self._seen = 0  # ids whose text is in `_text`
        self._before = ""  # text of the ids from `_start` to `_seen`
        self._text = ""
        self._given = 0
        self.stopped = False
        self.stop = ""  # the stop string that is complete

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return self._text[: self._given]

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        self._take(final=False)
        return self._give(self._certain())

    def finish(self) -> str:
        self._take(final=True)
        self._certain()
        return self._give(len(self._text))

    def _take(self, final: bool) -> None:
        """Text of the new ids: the decoded window less the part of it that was decoded before."""
        if self.stopped or self._seen == len(self._ids):
            return
        after = self._decode(self._ids[self._start :])
        if after.endswith(BROKEN) and not final:
            return
        self._text += after[len(self._before) :]
        self._seen, self._before = len(self._ids), after
        if self._seen - self._start > 2 * WINDOW:
            self._start = self._seen - WINDOW
            self._before = self._decode(self._ids[self._start :])

    def _certain(self) -> int:
        """How far the text cannot become part of a stop string; cuts it where one is complete."""
        end, complete = clear_of(self._text, self._stops)
        if complete:
            self.stop = next(stop for stop in self._stops if self._text.startswith(stop, end))
            self._text, self.stopped = self._text[:end], True
        return end

    def _give(self, end: int) -> str:
        start, self._given = self._given, max(self._given, end)
        return self._text[start : self._given]


def clear_of(text: str, marks: Sequence[str]) -> tuple[int, bool]:
    """Up to where the text holds no mark nor the beginning of one; whether one is complete.

    >>> clear_of("a</th", ["</think>"]), clear_of("a</think>b", ["</think>"])
    ((1, False), (1, True))
    """
    found = [at for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        return min(found), True
    held = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), held, -1):
            if text.endswith(mark[:length]):
                held = length
                break
    return len(text) - held, False


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
    """None where it is none, or where its client could not give it back."""
    try:
        call = json.loads(block)
        if not isinstance(call, dict) or call.get("name") not in names:
            return None
        arguments = call.get("arguments", {})
        INPUT.read(arguments if isinstance(arguments, dict) else {"arguments": arguments})
    except (ValueError, TypeError, RecursionError, Unfit):  # TypeError: a name that is a list
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": call["name"], "arguments": text}
