"""Whether token ids mean the same to two models: their tokenizer.json compared, without a library,
or what a served model makes of some ids.

A file that is not there, or has another form, tells nothing: the sizes of the vocabularies must do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dora_rl.config import RewardConfig
from dora_rl.rewards.endpoint import EndpointFailed
from dora_rl.rewards.teacher import ServedTeacher
from dora_rl.types import UserError

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # a token that is a part of a character


def first_difference(one: Path, other: Path) -> str:
    """The first token whose id is another one in the second model, in words; empty: none is."""
    mine, theirs = token_ids(one), token_ids(other)
    if not mine or not theirs:
        return ""
    for token, number in sorted(mine.items(), key=lambda pair: pair[1]):
        if (there := theirs.get(token)) != number:
            where = "is not there" if there is None else f"is {there} there"
            return f"token {token!r}, {number} of the model, {where}"
    return ""


def token_ids(directory: Path) -> dict[str, int]:
    """The id of each token of a model directory; empty where the file does not say."""
    try:
        data: Any = json.loads((directory / "tokenizer.json").read_text())
        vocab = data["model"]["vocab"]
        if isinstance(vocab, list):  # with scores, in the order of their ids
            vocab = {token: number for number, (token, _) in enumerate(vocab)}
        added = {entry["content"]: entry["id"] for entry in data.get("added_tokens", ())}
        return {**vocab, **added}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def check_served(
    section: RewardConfig, token_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> None:
    """Ask the teacher for one text, so that an endpoint that is away, or reads other tokens, is one
    line at the start."""
    try:
        _, words = ServedTeacher(section).text_logprobs(token_ids)
    except EndpointFailed as failed:
        raise UserError(f"reward.teacher_url: {section.teacher_url}: {failed}") from None
    for number, word in zip(token_ids, words, strict=True):
        own = decode([number])
        if own != word and _BROKEN not in own and not word.startswith("bytes:"):
            raise UserError(
                f"reward.teacher_url: token {number} is {word!r} to the teacher and {own!r} to the "
                "model; serve a model with the same tokenizer"
            )
