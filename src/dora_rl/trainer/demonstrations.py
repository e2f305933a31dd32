"""Demonstrations: rows of jsonl files, as documents whose trained tokens are the assistant's.

    {"prompt": ..., "completion": ...}     each side a string or a list of messages
    {"messages": [...], "tools": [...]}    every assistant message is trained on, and nothing else

A string prompt is encoded as the rollout encodes it (with the tokenizer's own beginning of text),
messages through the chat template. What the assistant writes begins behind the template's
generation prompt and ends with the end of sequence, as what a model generates does; where the
template marks it itself (`{% generation %}`), that holds. Invariant: a row that cannot be used is
an error that names its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jinja2 import TemplateError

from dora_rl.model.tokenizer import Tokenizer
from dora_rl.trainer.documents import Document
from dora_rl.types import UserError
from dora_rl.user_code import require

Messages: TypeAlias = list[dict[str, Any]]
COMPLETION_COLUMNS = ("completion", "response", "output")
_REFUSED = (ValueError, TypeError, KeyError, TemplateError)
_MARKED = re.compile(r"\{%-?\s*generation\b")


def _document(parts: Sequence[tuple[Sequence[int], bool]]) -> Document:
    """Of parts that are trained on, or not."""
    ids = torch.tensor([token for tokens, _ in parts for token in tokens])
    mask = torch.tensor([trained for tokens, trained in parts for _ in tokens])
    rows = torch.nonzero(mask).flatten() - 1
    return Document(ids, rows, torch.zeros(len(rows)), reward=0.0, version=0)


def read_rows(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, row) of every non-empty line."""
    for path in paths:
        require((path.is_file(), f"sft data '{path}': no such file"))
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg})") from error
    require(
        (
            isinstance(row, dict),
            f"{where}: a row must be an object with prompt and completion, or messages",
        )
    )
    return row


def encode_row(row: dict[str, Any], tokenizer: Tokenizer, where: str, add_eos: bool) -> Document:
    """One demonstration; the end of sequence is added to a string completion if asked."""
    if "prompt" not in row and "messages" in row:
        return _messages(row, tokenizer, where)
    prompt = row.get("prompt")
    column = next((c for c in COMPLETION_COLUMNS if c in row), None)
    if not isinstance(prompt, str | list) or column is None:
        raise UserError(f"{where}: a row needs 'prompt' and 'completion', or 'messages'")
    completion = row[column]
    if isinstance(prompt, list):
        head = _template(tokenizer, prompt, True, where)
        if isinstance(completion, list):
            return _conversation(tokenizer, head, [*prompt, *completion], where)
        start = tokenizer.encode(head, add_special_tokens=False)
    else:
        start = tokenizer.encode(prompt)
    if not isinstance(completion, str):
        raise UserError(f"{where}: '{column}' must be a string where the prompt is one")
    end = list(tokenizer.encode(completion, add_special_tokens=False))
    eos_id: int | None = getattr(tokenizer, "eos_token_id", None)
    if add_eos and eos_id is not None:
        end.append(eos_id)
    require((start and end, f"{where}: prompt and completion must each have at least one token"))
    return _document([(start, False), (end, True)])


def _template(
    tokenizer: Tokenizer, messages: Messages, generate: bool, where: str, **more: Any
) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, **more
        )
    except _REFUSED as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{where}: the chat template refuses the messages ({line})") from error


def _conversation(tokenizer: Tokenizer, head: str, messages: Messages, where: str) -> Document:
    text = _template(tokenizer, messages, False, where)
    end = tokenizer.encode(text[len(head) :], add_special_tokens=False)
    require(
        (
            text.startswith(head),
            f"{where}: the chat template renders the prompt differently once it is answered; "
            "give the completion as a string",
        ),
        (end, f"{where}: the completion is empty"),
    )
    return _document([(tokenizer.encode(head, add_special_tokens=False), False), (end, True)])


# -- messages: every turn of the assistant is trained on -----------------------------------------


def _messages(row: dict[str, Any], tokenizer: Tokenizer, where: str) -> Document:
    messages = row["messages"]
    is_list = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    spoken = [m.get("role") == "assistant" for m in messages] if is_list else []
    require(
        (is_list and messages, f"{where}: 'messages' must be a list of messages"),
        (any(spoken), f"{where}: no message is the assistant's: there is nothing to train on"),
        (
            bool(getattr(tokenizer, "chat_template", None)),
            f"{where}: 'messages' need a chat template, and the tokenizer has none",
        ),
    )
    more = {"tools": row["tools"]} if row.get("tools") else {}
    if _MARKED.search(str(getattr(tokenizer, "chat_template", ""))):
        return _as_marked(tokenizer, messages, where, more)
    turns = _turns(tokenizer, messages, spoken, where, more)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return _document([(encode(text), trained) for text, trained in turns])


def _turns(
    tokenizer: Tokenizer,
    messages: Messages,
    spoken: Sequence[bool],
    where: str,
    more: dict[str, Any],
) -> Iterator[tuple[str, bool]]:
    """The rendered conversation, cut where the assistant begins and ends. What it says is what the
    template adds behind its own generation prompt, up to the end of sequence."""
    whole, done = _template(tokenizer, messages, False, where, **more), 0
    eos = str(getattr(tokenizer, "eos_token", None) or "")
    for number, is_assistant in enumerate(spoken):
        if not is_assistant:
            continue
        require((number, f"{where}: the first message is the assistant's"))
        head = _template(tokenizer, messages[:number], True, where, **more)
        text = _template(tokenizer, messages[: number + 1], False, where, **more)
        require(
            (
                whole.startswith(text) and text.startswith(head) and len(head) >= done,
                f"{where}: the chat template renders message {number} differently in the whole "
                "conversation; give one row for each turn of it, as prompt and completion",
            )
        )
        begin, end = len(head), len(text)
        if eos and eos in whole[begin:end]:
            end = whole.rindex(eos, begin, end) + len(eos)
        yield whole[done:begin], False
        yield whole[begin:end], True
        done = end
    yield whole[done:], False


def _as_marked(
    tokenizer: Tokenizer, messages: Messages, where: str, more: dict[str, Any]
) -> Document:
    """The template itself says what the assistant writes."""
    try:
        found: Any = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **more
        )
    except _REFUSED as error:
        raise UserError(f"{where}: the chat template refuses the messages ({error})") from error
    ids, mask = found["input_ids"], found["assistant_masks"]
    require(
        (
            any(mask) and not mask[0],
            f"{where}: the chat template marks nothing of it as the assistant's",
        )
    )
    return _document([([token], bool(trained)) for token, trained in zip(ids, mask, strict=True)])
