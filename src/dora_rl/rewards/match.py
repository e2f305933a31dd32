"""Rewards that look at the text alone: exact and regex match, format, length shaping.

Pure functions of one sample, in the plain form. Nothing here waits, remembers or raises for a
strange completion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dora_rl.rewards.base import ScoreItem
from dora_rl.types import UserError
from dora_rl.user_code import one_line

Scorer = Callable[[ScoreItem], float | None]


def compiled(option: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(
            f"reward: {option} {pattern!r} is no regular expression ({one_line(error)})"
        ) from error


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The first group of the last match, or all of it if the pattern has no group."""
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    found = matches[-1]
    return next((group for group in found.groups() if group is not None), found.group())


def normal(text: str, *, ignore_case: bool, ignore_space: bool) -> str:
    text = text.strip()
    if ignore_space:
        text = " ".join(text.split())
    return text.casefold() if ignore_case else text


def exact(
    *, extract: str = "", ignore_case: bool = False, ignore_space: bool = False, miss: float = 0.0
) -> Scorer:
    """1 if the completion is the answer. `extract`: a pattern whose last match is compared."""
    pattern = compiled("extract", extract) if extract else None

    def score(item: ScoreItem) -> float | None:
        if item.answer is None:
            return None
        given = item.completion if pattern is None else last_match(pattern, item.completion)
        if given is None:
            return miss
        same = [
            normal(text, ignore_case=ignore_case, ignore_space=ignore_space)
            for text in (given, item.answer)
        ]
        return 1.0 if same[0] == same[1] else miss

    return score


def regex(*, pattern: str, full: bool = False, hit: float = 1.0, miss: float = 0.0) -> Scorer:
    """`hit` if the pattern is found in the completion (`full`: is all of it).

    `{answer}` in the pattern stands for the gold answer, taken literally.
    """
    fixed = None if "{answer}" in pattern else compiled("pattern", pattern)
    compiled("pattern", pattern.replace("{answer}", "x"))

    def score(item: ScoreItem) -> float | None:
        compiled_pattern = fixed
        if compiled_pattern is None:
            if item.answer is None:
                return None
            compiled_pattern = re.compile(
                pattern.replace("{answer}", re.escape(item.answer)), re.DOTALL
            )
        find = compiled_pattern.fullmatch if full else compiled_pattern.search
        return hit if find(item.completion.strip() if full else item.completion) else miss

    return score


def format_tags(*, tags: Sequence[str] = ("think", "answer"), partial: bool = False) -> Scorer:
    """1 if the completion is `<think>…</think><answer>…</answer>`: each tag once, in order, with
    nothing but space outside. `partial`: otherwise the share of tags that stand there once."""
    if not tags or any(not re.fullmatch(r"[\w-]+", tag) for tag in tags):
        raise UserError(f"reward: format needs tags made of letters, not {list(tags)}")
    whole = re.compile(
        r"\s*" + r"\s*".join(rf"<{tag}>.*?</{tag}>" for tag in tags) + r"\s*", re.DOTALL
    )

    def once(tag: str, text: str) -> bool:
        return text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1

    def score(item: ScoreItem) -> float:
        num_once = sum(once(tag, item.completion) for tag in tags)
        if num_once == len(tags) and whole.fullmatch(item.completion):
            return 1.0
        # A full house in the wrong order is worth less than the right one.
        return min(num_once, len(tags) - 0.5) / len(tags) if partial else 0.0

    return score


def length(
    *,
    tokens_max: int,
    buffer_tokens: int = 0,
    penalty: float = 1.0,
    tokens_min: int = 0,
    unfinished: float = 0.0,
) -> Scorer:
    """Shaping, to be added to another reward: 0 inside the limits, down to -penalty outside.

    Linear over the last `buffer_tokens` before `tokens_max` (DAPO's soft overlong punishment),
    linear below `tokens_min`. `unfinished` is added where the token limit cut the response off.
    """
    if not 0 <= buffer_tokens <= tokens_max or tokens_min > tokens_max - buffer_tokens:
        raise UserError(
            f"reward: length needs tokens_min ≤ tokens_max - buffer_tokens, "
            f"got {tokens_min}, {tokens_max}, {buffer_tokens}"
        )

    def score(item: ScoreItem) -> float:
        num_tokens = len(item.completion_ids)
        over = num_tokens - (tokens_max - buffer_tokens)
        share = 0.0
        if num_tokens > tokens_max:
            share = 1.0
        elif over > 0 and buffer_tokens:
            share = over / buffer_tokens
        elif num_tokens < tokens_min:
            share = 1.0 - num_tokens / tokens_min
        return -penalty * share + (unfinished if item.finish == "length" else 0.0)

    return score
