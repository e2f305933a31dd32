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
from dora_rl.rewards.base import CallLimits, Reward, ScoreError, ScoreItem, one_line
from dora_rl.rewards.calls import Expired, deadline
from dora_rl.rewards.function import read_score
from dora_rl.types import UserError

Maker = Callable[..., Callable[[ScoreItem], float | None]]

SIMPLE: dict[str, Maker] = {
    "exact": match.exact,
    "regex": match.regex,
    "format": match.format_tags,
    "length": match.length,
}


class ItemReward:
    """A scorer of single items, with the time limit."""

    def __init__(
        self, name: str, scorer: Callable[[ScoreItem], float | None], limits: CallLimits
    ) -> None:
        self.name = name
        self._scorer = scorer
        self._limits = limits

    def missing(self, columns: Collection[str]) -> list[str]:
        return []

    def close(self) -> None:
        return None

    def score(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        return [self._one(item) for item in items]

    def _one(self, item: ScoreItem) -> float | ScoreError:
        try:
            with deadline(self._limits.timeout_s):
                return read_score(self._scorer(item))
        except Expired:
            return ScoreError(f"took longer than timeout_s = {self._limits.timeout_s:g}")
        except Exception as error:  # noqa: BLE001 - libraries raise anything on strange input
            return ScoreError(f"raised {one_line(error)}")


def names() -> list[str]:
    return sorted(SIMPLE)


def make_builtin(
    name: str, base_dir: Path, options: Mapping[str, Any], limits: CallLimits
) -> Reward:
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        raise UserError(
            f"reward: no built-in {name!r}"
            + (f", did you mean {near[0]!r}?" if near else "")
            + f"; give one of {', '.join(names())}, path/to/file.py:name or package.module:name"
        )
    maker = SIMPLE[name]
    check_options(name, maker, options)
    return ItemReward(name, maker(**options), limits)


def check_options(name: str, maker: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        inspect.signature(maker).bind(**options)
    except TypeError as error:
        known = ", ".join(p for p in inspect.signature(maker).parameters)
        raise UserError(f"reward: {name}: {error}; its options are {known}") from error
