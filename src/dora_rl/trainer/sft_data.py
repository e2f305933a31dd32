"""Demonstrations from jsonl: prompt and completion to token ids with the completion marked.

Reads `{"prompt": ..., "completion": ...}` rows; each side is a string or a message list. A string
prompt is encoded as the rollout encodes it (with the tokenizer's own beginning of text), messages
through the chat template. Invariant: a row that cannot be used is an error that names its line, or
is counted as too long; none is dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dora_rl.model.tokenizer import Tokenizer
from dora_rl.types import UserError

Messages: TypeAlias = list[dict[str, Any]]
COMPLETION_COLUMNS = ("completion", "response", "output")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Token ids, the first `prompt_tokens` of which are not trained on."""

    token_ids: tuple[int, ...]
    prompt_tokens: int


def read_rows(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, row) of every non-empty line."""
    for path in paths:
        if not path.is_file():
            raise UserError(f"sft data '{path}': no such file")
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be an object with prompt and completion")
    return row


def encode_row(
    row: dict[str, Any], tokenizer: Tokenizer, where: str, add_eos: bool
) -> Demonstration:
    """One demonstration; the end of sequence is added to a string completion if asked."""
    prompt = row.get("prompt")
    column = next((c for c in COMPLETION_COLUMNS if c in row), None)
    if not isinstance(prompt, str | list) or column is None:
        raise UserError(f"{where}: a row needs 'prompt' and 'completion'")
    completion = row[column]
    if isinstance(prompt, list):
        head = _template(tokenizer, prompt, True, where)
        if isinstance(completion, list):
            return _conversation(tokenizer, head, [*prompt, *completion], where)
        start = list(tokenizer.encode(head, add_special_tokens=False))
    else:
        start = list(tokenizer.encode(prompt))
    if not isinstance(completion, str):
        raise UserError(f"{where}: '{column}' must be a string where the prompt is one")
    end = list(tokenizer.encode(completion, add_special_tokens=False))
    eos_id: int | None = getattr(tokenizer, "eos_token_id", None)
    if add_eos and eos_id is not None:
        end.append(eos_id)
    if not start or not end:
        raise UserError(f"{where}: prompt and completion must each have at least one token")
    return Demonstration((*start, *end), len(start))


def _template(tokenizer: Tokenizer, messages: Messages, generate: bool, where: str) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )
    except (ValueError, TypeError, KeyError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{where}: the chat template refuses the messages ({line})") from error


def _conversation(tokenizer: Tokenizer, head: str, messages: Messages, where: str) -> Demonstration:
    text = _template(tokenizer, messages, False, where)
    if not text.startswith(head):
        raise UserError(
            f"{where}: the chat template renders the prompt differently once it is answered; "
            "give the completion as a string"
        )
    start = list(tokenizer.encode(head, add_special_tokens=False))
    end = list(tokenizer.encode(text[len(head) :], add_special_tokens=False))
    if not end:
        raise UserError(f"{where}: the completion is empty")
    return Demonstration((*start, *end), len(start))
