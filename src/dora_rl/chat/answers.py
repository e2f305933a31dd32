"""Answers in the API's shapes, whole or in chunks, from the pieces of a generation.

Beside the usual fields every answer and every chunk carries `weight_version`, and `session` where
there is one; with `return_token_ids` also `prompt_token_ids` and `token_ids`, as vLLM names them.
Invariant: chunks of a choice add up to the same choice in a whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dora_rl.chat.requests import Ask, Message
from dora_rl.chat.service import Generation, Piece
from dora_rl.chat.text import TextStream, clear_of
from dora_rl.chat.tool_calls import OPEN, read_tool_calls
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
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_drawn}
        return counts | {"total_tokens": num_prompt + num_drawn}


@dataclass(slots=True)
class Choice:
    """One response as it grows."""

    frame: Frame
    index: int
    stream: TextStream = field(init=False)
    token_ids: list[int] = field(default_factory=list[int])
    pieces: list[Piece] = field(default_factory=list[Piece])
    finish: Finish | None = None
    num_shown: int = 0  # characters that chunks have given out
    word_at: int = 0  # where the next token of a chunk begins, counted in token texts
    text: str = ""

    def __post_init__(self) -> None:
        ask = self.frame.ask
        self.stream = TextStream(self.frame.decode, ask.params.stop_strings)

    def add(self, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        self.pieces.append(piece)
        if self.frame.ask.stream:
            self.text += self.stream.push(piece.token_ids)
        if piece.finish is not None:
            self.finish = piece.finish
            if not self.frame.ask.stream:  # one decoding is enough
                self.stream.push(self.token_ids)
            self.stream.finish()
            self.text = self.stream.text

    @property
    def prompt_ids(self) -> list[int]:
        at = self.index // self.frame.ask.num_samples
        return list(self.frame.generation.prompts[at])

    def message(self) -> Message:
        prefix = f"call_{self.frame.id.rpartition('-')[2]}_{self.index}"
        return read_tool_calls(self.text, self.frame.tools, prefix)

    def finish_reason(self, message: Message | None = None) -> str | None:
        if self.finish is None:
            return None
        calls = message is not None and "tool_calls" in message
        return "tool_calls" if calls and self.finish is Finish.STOP else str(self.finish)

    def whole(self) -> dict[str, Any]:
        """The entry of an answer that is not streamed."""
        body: dict[str, Any] = {"index": self.index}
        if self.frame.chat:
            message = self.message()
            reason = self.finish_reason(message)
            body |= {"message": message | {"refusal": None}, "finish_reason": reason}
            if "tool_calls" in message and not message["content"]:
                body["message"]["content"] = None
        else:
            body |= {"text": self.text, "finish_reason": self.finish_reason()}
        body["logprobs"] = self._logprobs(self.pieces) if self.frame.ask.logprobs else None
        return body | self._ids(self.token_ids, first=True)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The entry of a chunk; `add` has seen the piece already."""
        body: dict[str, Any] = {"index": self.index}
        first = len(self.pieces) == 1
        if self.frame.chat:
            body["delta"], body["finish_reason"] = self._delta(first)
        else:
            body |= {"text": self._shown(len(self.text)), "finish_reason": self.finish_reason()}
        body["logprobs"] = self._logprobs([piece]) if self.frame.ask.logprobs else None
        return body | self._ids(piece.token_ids, first)

    def _delta(self, first: bool) -> tuple[dict[str, Any], str | None]:
        """Text that may be the beginning of a tool call is held back until it is known."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if self.finish is None:
            marks = (OPEN,) if self.frame.tools else ()
            delta["content"] = self._shown(clear_of(self.text, marks)[0])
            return delta, None
        message = self.message()
        delta["content"] = message["content"][self.num_shown :]
        if "tool_calls" in message:
            calls = enumerate(message["tool_calls"])
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
        return delta, self.finish_reason(message)

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

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        rows = [
            (token, logprob, piece.top_logprobs[i] if piece.top_logprobs else ())
            for piece in pieces
            for i, (token, logprob) in enumerate(zip(piece.token_ids, piece.logprobs, strict=True))
        ]
        if self.frame.chat:
            entry = self._entry
            content = [
                entry(token, logprob) | {"top_logprobs": [entry(*other) for other in top]}
                for token, logprob, top in rows
            ]
            return {"content": content, "refusal": None}
        tokens = [self._word(token) for token, _, _ in rows]
        offsets = []
        for token in tokens:
            offsets.append(self.word_at)
            self.word_at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(logprob, LOGPROB_MIN) for _, logprob, _ in rows],
            "top_logprobs": [
                {self._word(other): max(value, LOGPROB_MIN) for other, value in top}
                for _, _, top in rows
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        word = self._word(token)
        value = max(logprob, LOGPROB_MIN)
        return {"token": word, "logprob": value, "bytes": list(word.encode())}

    def _word(self, token: int) -> str:
        return self.frame.tokenizer.decode([token])
