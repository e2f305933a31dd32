"""From a row to a prompt: text, token ids, gold answer, columns for the reward.

Never reads files and never chooses rows. Invariant: the same row always gives the same prompt, and
a row that cannot give one is a `UserError` that says where the row is and what to change.

A string prompt is encoded as it stands (with the tokenizer's own beginning-of-text, if any); a
message list goes through the tokenizer's chat template. Every column of the row reaches the reward
in `Prompt.columns`; there, `prompt` is the prompt as the user wrote it (string or messages).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

from dora_rl.config import DataConfig, DataSource
from dora_rl.data.rows import Row, one_line
from dora_rl.model.tokenizer import Tokenizer
from dora_rl.types import Prompt, UserError

ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "label")
# What a template may add to a message (role, begin, end), for the quick test of length only.
MESSAGE_TOKENS_SLACK = 16


class Renderer:
    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._overhead: int | None = None

    def prompt(self, index: int, row: Row, source: DataSource, where: str) -> Prompt:
        written = read_prompt(row, source, where)
        text, token_ids = self._encode(written, where)
        columns = {name: plain(value) for name, value in row.items()}
        columns["prompt"] = written
        columns.setdefault("data_source", source.name or source.path)
        answer = read_answer(row, source, where)
        if source.prompt_tokens == "first":
            token_ids = token_ids[:1]
        return Prompt(index, token_ids, text, answer, columns, source.env)

    def fits(self, row: Row, source: DataSource, where: str) -> bool:
        """Whether the prompt is within the limit. Most rows are passed without tokenizing them.

        A token stands for at least one byte of ASCII text, so a text with fewer bytes than the
        limit, less what the template adds, cannot be too long.
        """
        written = read_prompt(row, source, where)
        limit = self._config.prompt_tokens_max
        if not limit:
            return True
        texts = [written] if isinstance(written, str) else _contents(written)
        if texts is not None and all(text.isascii() for text in texts):
            slack = self._template_tokens(where) + MESSAGE_TOKENS_SLACK * len(texts)
            if sum(map(len, texts)) + slack <= limit:
                return True
        return len(self._encode(written, where)[1]) <= limit

    def _template_tokens(self, where: str) -> int:
        if self._overhead is None:
            empty: list[dict[str, object]] = [{"role": "user", "content": "x"}]
            plain_text = self._config.chat == "never" or not self._has_template()
            self._overhead = len(self._encode("x" if plain_text else empty, where)[1])
        return self._overhead

    def _has_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def _encode(
        self, written: str | list[dict[str, object]], where: str
    ) -> tuple[str, tuple[int, ...]]:
        if isinstance(written, str) and self._config.chat == "always":
            written = [{"role": "user", "content": written}]
        if isinstance(written, str):
            text, special = written, True
        else:
            text, special = self._apply_template(written, where), False
        try:
            token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=special))
        except (UnicodeError, TypeError) as error:
            raise UserError(f"{where}: the prompt cannot be tokenized ({error})") from error
        if not token_ids:
            raise UserError(f"{where}: the prompt has no tokens; leave the row out or fill it")
        return text, token_ids

    def _apply_template(self, messages: list[dict[str, object]], where: str) -> str:
        if self._config.chat == "never":
            raise UserError(f"{where}: the prompt is a message list, but data.chat is 'never'")
        if not self._has_template():
            raise UserError(
                f"{where}: the prompt is a message list, but the tokenizer has no chat template; "
                f"use a model with one or string prompts"
            )
        if self._config.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._config.system_prompt}, *messages]
        prefilled = messages[-1]["role"] == "assistant"
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not prefilled,
                continue_final_message=prefilled,
                **self._config.template_options,
            )
        except Exception as error:
            # A template is the model author's program and may raise anything.
            raise UserError(
                f"{where}: the chat template refused the prompt ({one_line(error)})"
            ) from error


def read_prompt(row: Row, source: DataSource, where: str) -> str | list[dict[str, object]]:
    """The prompt as the user wrote it, checked: a string, or messages with role and content."""
    value = row.get(source.prompt_column)
    if value is None:
        raise UserError(
            f"{where}: no {source.prompt_column!r} (columns: {', '.join(map(str, row))}); "
            f"set prompt_column to the column that holds the prompt"
        )
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where}: the prompt is empty; leave the row out or fill it")
        return value
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(
            f"{where}: {source.prompt_column!r} must be a string or a list of messages, "
            f"not {type(value).__name__ if value else 'an empty list'}"
        )
    return [_message(entry, number, where) for number, entry in enumerate(value)]


def _message(entry: object, number: int, where: str) -> dict[str, object]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
        raise UserError(f"{where}: message {number} must be an object with 'role' and 'content'")
    message = {str(key): plain(value) for key, value in entry.items() if value is not None}
    if not isinstance(message.get("content"), (str, list)) and "tool_calls" not in message:
        raise UserError(f"{where}: message {number} has no 'content' (a string)")
    return message


def _contents(messages: Sequence[Mapping[str, object]]) -> list[str] | None:
    """All texts of plain messages; None where something is more than a role and a text."""
    contents = [message.get("content") for message in messages]
    if any(message.keys() != {"role", "content"} for message in messages):
        return None
    if not all(isinstance(content, str) for content in contents):
        return None
    return cast(list[str], contents)


def read_answer(row: Row, source: DataSource, where: str) -> str | None:
    """The gold answer: of its column, what follows the mark (`answer_after`) if there is one."""
    text = _find_answer(row, source, where)
    mark = source.answer_after
    if text is None or not mark:
        return text
    _, found, rest = text.rpartition(mark)
    if not found:
        raise UserError(
            f"{where}: no {mark!r} in the answer; set answer_after to the mark before the final "
            "answer, or leave it out to take the whole column"
        )
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", rest.strip())


def _find_answer(row: Row, source: DataSource, where: str) -> str | None:
    """Where the field's datasets keep it."""
    if source.answer_column:
        value: object = row
        for part in source.answer_column.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            raise UserError(
                f"{where}: no {source.answer_column!r} (columns: {', '.join(map(str, row))}); "
                f"set answer_column, or leave it out to search for the answer"
            )
        return _answer_text(value)
    for name in ANSWER_COLUMNS:
        if row.get(name) is not None:
            return _answer_text(row[name])
    nested = row.get("reward_model")
    if isinstance(nested, Mapping) and nested.get("ground_truth") is not None:
        return _answer_text(nested["ground_truth"])
    return None


def _answer_text(value: object) -> str:
    value = plain(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plain(value: object) -> object:
    """The value as JSON can carry it, since prompts travel between processes."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime, date, time, Decimal, UUID)):
        return str(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return plain(cast(Any, value).tolist())
    return str(value)
