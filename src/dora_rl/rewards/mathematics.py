"""Mathematical answers, compared by value with math-verify (an optional library).

`\\frac{1}{2}`, `0.5` and `1/2` are the same answer. The library's own time-outs are off: they need
the main thread's alarm, which is ours. Never raises for text that is no mathematics; that is a
wrong answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dora_rl.rewards.base import ScoreItem
from dora_rl.rewards.match import compiled, last_match
from dora_rl.types import UserError

TIMEOUT_S = 5.0


def math(
    *,
    extract: str = "",
    precision_digits: int = 6,
    miss: float = 0.0,
    timeout_s: float = TIMEOUT_S,
) -> Callable[[ScoreItem], float | None]:
    """1 if the completion's final answer equals the gold one. `extract`: look only there.

    An answer that names no formula (`Paris`) is compared as text. `timeout_s` is kept by the
    caller.
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
        gold = parse_gold(item.answer)
        if not gold:
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
