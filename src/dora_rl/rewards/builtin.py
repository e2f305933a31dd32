"""The rewards that come with the package, by name, and the reward made of a per-item scorer.

Never imports a heavy library before a reward that needs it is made. Invariant: every built-in is
made by a function of keyword options alone, so that the config can name it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dora_rl.rewards import match
from dora_rl.rewards.base import CallLimits, Reward, ScoreError, ScoreItem
from dora_rl.rewards.calls import Expired, deadline
from dora_rl.rewards.function import read_score
from dora_rl.types import UserError
from dora_rl.user_code import one_line

Maker = Callable[..., Callable[[ScoreItem], float | None]]

SIMPLE: dict[str, Maker] = {
    "exact": match.exact,
    "regex": match.regex,
    "format": match.format_tags,
    "length": match.length,
}


class ItemReward:
    """A scorer of single items, with the time limit.

    `late` is the score where time runs out and the response is to blame; None makes it an error.
    """

    many = False

    def __init__(
        self,
        name: str,
        scorer: Callable[[ScoreItem], float | None],
        timeout_s: float,
        late: float | None = None,
        *,
        needs_answer: bool = False,
    ) -> None:
        self.name = name
        self.needs_answer = needs_answer
        self._scorer = scorer
        self._timeout_s = timeout_s
        self._late = late

    def missing(self, columns: Collection[str]) -> list[str]:
        return []

    def close(self) -> None:
        return None

    def score(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        return [self._one(item) for item in items]

    def _one(self, item: ScoreItem) -> float | ScoreError:
        try:
            with deadline(self._timeout_s):
                return read_score(self._scorer(item))
        except Expired:
            if self._late is not None:
                return self._late
            return ScoreError(f"took longer than timeout_s = {self._timeout_s:g}")
        except Exception as error:  # noqa: BLE001 - libraries raise anything on strange input
            return ScoreError(f"raised {one_line(error)}")


def _makers(base_dir: Path, limits: CallLimits) -> dict[str, Callable[..., Reward]]:
    """Those that are more than a function of one item. Imports happen when one is made."""

    def math(**options: Any) -> Reward:
        from dora_rl.rewards import mathematics

        check_options("math", mathematics.math, options)
        # A formula that takes for ever (9^9^9) is a wrong answer, not a broken reward.
        timeout_s = min(options.pop("timeout_s", mathematics.TIMEOUT_S), limits.timeout_s)
        scorer = mathematics.math(**options)
        late = options.get("miss", 0.0)
        return ItemReward("math", scorer, timeout_s, late=late, needs_answer=True)

    def code(**options: Any) -> Reward:
        from dora_rl.rewards.code import CodeReward

        check_options("code", CodeReward, options)
        return CodeReward(limits, **options)

    def judge(**options: Any) -> Reward:
        from dora_rl.rewards.judge import JudgeReward

        check_options("judge", JudgeReward, options)
        return JudgeReward(limits, **options)

    def model(**options: Any) -> Reward:
        from dora_rl.rewards.model import ModelReward

        check_options("model", ModelReward, options)
        return ModelReward(limits, base_dir, **options)

    return {"math": math, "code": code, "judge": judge, "model": model}


def make_builtin(
    name: str, base_dir: Path, options: Mapping[str, Any], limits: CallLimits
) -> Reward:
    makers = _makers(base_dir, limits)
    names = sorted([*SIMPLE, *makers])
    try:
        if name in makers:
            return makers[name](**options)
        if name in SIMPLE:
            check_options(name, SIMPLE[name], options)
            needs = name == "exact" or "{answer}" in str(options.get("pattern", ""))
            return ItemReward(name, SIMPLE[name](**options), limits.timeout_s, needs_answer=needs)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward: {name}: an option is wrong ({one_line(error)})") from error
    near = difflib.get_close_matches(name, names, n=1)
    raise UserError(
        f"reward: no built-in {name!r}"
        + (f", did you mean {near[0]!r}?" if near else "")
        + f"; give one of {', '.join(names)}, path/to/file.py:name or package.module:name"
    )


def check_options(name: str, maker: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Options are keyword-only arguments; what comes before them is ours to give."""
    parameters = inspect.signature(maker).parameters.values()
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    unknown = [option for option in options if option not in known]
    absent = [n for n, p in known.items() if p.default is p.empty and n not in options]
    if unknown or absent:
        wrong = f"no option {unknown[0]!r}" if unknown else f"option {absent[0]!r} is not set"
        raise UserError(f"reward: {name}: {wrong}; its options are {', '.join(known)}")
