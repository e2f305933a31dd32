"""The rewards that come with the package, by name.

Those that look at the text alone (exact and regex match, format, length shaping) and the one that
compares mathematics are functions of one sample, made into a reward with a time limit. Nothing in
them waits, remembers or raises for a strange completion. Never imports a heavy library before a
reward that needs it is made. Invariant: every built-in is made by a function of keyword options
alone, so that the config can name it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dora_rl.config import RewardConfig
from dora_rl.rewards.base import Reward, ScoreError, ScoreItem
from dora_rl.rewards.function import Expired, deadline, read_score
from dora_rl.types import UserError
from dora_rl.user_code import one_line, require

Scorer = Callable[[ScoreItem], float | None]
MATH_TIMEOUT_S = 5.0


def compiled(option: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(
            f"reward: {option} {pattern!r} is no regular expression ({one_line(error)})"
        ) from error


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The first group of the last match, or all of it if the pattern has no group."""
    if not (matches := list(pattern.finditer(text))):
        return None
    found = matches[-1]
    return next((group for group in found.groups() if group is not None), found.group())


def exact(
    *, extract: str = "", ignore_case: bool = False, ignore_space: bool = False, miss: float = 0.0
) -> Scorer:
    """1 if the completion is the answer. `extract`: a pattern whose last match is compared."""
    pattern = compiled("extract", extract) if extract else None

    def normal(text: str) -> str:
        text = " ".join(text.split()) if ignore_space else text.strip()
        return text.casefold() if ignore_case else text

    def score(item: ScoreItem) -> float | None:
        if item.answer is None:
            return None
        given = item.completion if pattern is None else last_match(pattern, item.completion)
        same = given is not None and normal(given) == normal(item.answer)
        return 1.0 if same else miss

    return score


def regex(*, pattern: str, full: bool = False, hit: float = 1.0, miss: float = 0.0) -> Scorer:
    """`hit` if the pattern is found in the completion (`full`: is all of it).

    `{answer}` in the pattern stands for the gold answer, taken literally.
    """
    compiled("pattern", pattern.replace("{answer}", "x"))

    def score(item: ScoreItem) -> float | None:
        if item.answer is None and "{answer}" in pattern:
            return None
        # Python remembers what it has compiled.
        wanted = re.compile(pattern.replace("{answer}", re.escape(item.answer or "")), re.DOTALL)
        text = item.completion
        return hit if (wanted.fullmatch(text.strip()) if full else wanted.search(text)) else miss

    return score


def format_tags(*, tags: Sequence[str] = ("think", "answer"), partial: bool = False) -> Scorer:
    """1 if the completion is `<think>…</think><answer>…</answer>`: each tag once, in order, with
    nothing but space outside. `partial`: otherwise the share of tags that stand there once."""
    require(
        (
            tags and all(re.fullmatch(r"[\w-]+", tag) for tag in tags),
            f"reward: format needs tags made of letters, not {list(tags)}",
        )
    )
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
    require(
        (
            0 <= buffer_tokens <= tokens_max and tokens_min <= tokens_max - buffer_tokens,
            f"reward: length needs tokens_min ≤ tokens_max - buffer_tokens, "
            f"got {tokens_min}, {tokens_max}, {buffer_tokens}",
        )
    )

    def score(item: ScoreItem) -> float:
        num_tokens = len(item.completion_ids)
        over, under = num_tokens - (tokens_max - buffer_tokens), tokens_min - num_tokens
        share = min(1.0, over / (buffer_tokens or 1)) if over > 0 else 0.0
        if under > 0:
            share = 1.0 - num_tokens / tokens_min
        return -penalty * share + (unfinished if item.finish == "length" else 0.0)

    return score


def math(
    *,
    extract: str = "",
    precision_digits: int = 6,
    miss: float = 0.0,
    timeout_s: float = MATH_TIMEOUT_S,
) -> Scorer:
    """1 if the completion's final answer equals the gold one. `extract`: look only there.

    Compared by value with math-verify (an optional library): one half, 0.5 and 1/2 are the same
    answer. Its own time-outs are off: they need the main thread's alarm, which is ours. An answer
    that names no formula (`Paris`) is compared as text. `timeout_s` is kept by the caller.
    """
    try:
        import math_verify
    except ImportError as error:
        raise UserError(
            "reward: math needs math-verify; pip install 'dora-rl[math]', or use exact"
        ) from error
    # It warns at each call that its time-outs are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    pattern = compiled("extract", extract) if extract else None

    def parse(text: str) -> list[object]:
        return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def parse_gold(answer: str) -> list[object]:
        """Gold answers often come bare: `\\frac12` is LaTeX only between dollars."""
        return parse(answer) if "$" in answer or "\\boxed" in answer else parse(f"${answer}$")

    def score(item: ScoreItem) -> float | None:
        if item.answer is None:
            return None
        given = item.completion if pattern is None else last_match(pattern, item.completion)
        if given is None:
            return miss
        if given.strip() == item.answer.strip():
            return 1.0
        if not (gold := parse_gold(item.answer)):
            return miss
        target = parse(given)
        if not target and pattern is not None:
            target = parse_gold(given)
        same = math_verify.verify(
            gold,  # pyright: ignore[reportArgumentType]
            target,  # pyright: ignore[reportArgumentType]
            float_rounding=precision_digits,
            timeout_seconds=None,
        )
        return 1.0 if same else miss

    return score


class ItemReward(Reward):
    """A scorer of single items, with the time limit.

    `late` is the score where time runs out and the response is to blame; None makes it an error.
    """

    def __init__(
        self,
        name: str,
        scorer: Scorer,
        timeout_s: float,
        late: float | None = None,
        *,
        needs_answer: bool = False,
    ) -> None:
        self.name, self.needs_answer = name, needs_answer
        self._scorer, self._timeout_s, self._late = scorer, timeout_s, late

    def score_one(self, item: ScoreItem) -> float | ScoreError:
        try:
            with deadline(self._timeout_s):
                return read_score(self._scorer(item))
        except Expired:
            late = ScoreError(f"took longer than timeout_s = {self._timeout_s:g}")
            return late if self._late is None else self._late
        except Exception as error:  # noqa: BLE001 - libraries raise anything on strange input
            return ScoreError(f"raised {one_line(error)}")


SCORERS: dict[str, Callable[..., Scorer]] = {
    "exact": exact,
    "regex": regex,
    "format": format_tags,
    "length": length,
    "math": math,
}
# More than a function of one item; imported when one is made.
CLASSES = {"code": "CodeReward", "judge": "JudgeReward", "model": "ModelReward"}


def make_builtin(
    name: str, base_dir: Path, options: Mapping[str, Any], limits: RewardConfig
) -> Reward:
    try:
        if name in SCORERS:
            return _item_reward(name, options, limits)
        if name in CLASSES:
            kind = getattr(importlib.import_module(f"dora_rl.rewards.{name}"), CLASSES[name])
            check_options(name, kind, options)
            return kind(limits, *([base_dir] if name == "model" else []), **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward: {name}: an option is wrong ({one_line(error)})") from error
    names = sorted([*SCORERS, *CLASSES])
    near = difflib.get_close_matches(name, names, n=1)
    raise UserError(
        f"reward: no built-in {name!r}"
        + (f", did you mean {near[0]!r}?" if near else "")
        + f"; give one of {', '.join(names)}, path/to/file.py:name or package.module:name"
    )


def _item_reward(name: str, options: Mapping[str, Any], limits: RewardConfig) -> ItemReward:
    check_options(name, SCORERS[name], options)
    timeout_s, late = limits.timeout_s, None
    if name == "math":
        # A formula that takes for ever (9^9^9) is a wrong answer, not a broken reward.
        timeout_s = min(options.get("timeout_s", MATH_TIMEOUT_S), timeout_s)
        late = options.get("miss", 0.0)
    needs = name in ("exact", "math") or "{answer}" in str(options.get("pattern", ""))
    return ItemReward(name, SCORERS[name](**options), timeout_s, late, needs_answer=needs)


def check_options(name: str, maker: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Options are keyword-only arguments; what comes before them is ours to give."""
    parameters = inspect.signature(maker).parameters.values()
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    unknown = [option for option in options if option not in known]
    absent = [n for n, p in known.items() if p.default is p.empty and n not in options]
    if unknown or absent:
        wrong = f"no option {unknown[0]!r}" if unknown else f"option {absent[0]!r} is not set"
        raise UserError(f"reward: {name}: {wrong}; its options are {', '.join(known)}")
