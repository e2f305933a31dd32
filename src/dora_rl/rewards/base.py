"""Rewards: what is scored, what comes back, and how a function is found by name.

A reward turns finished responses into numbers. `score` never raises for a bad sample: a function
that raises, hangs or returns no finite number ends that sample alone, as a `ScoreError` with a
reason. Invariant: `score(items)` returns exactly one entry for each item, in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dora_rl.types import UserError
from dora_rl.user_code import load_object

if TYPE_CHECKING:
    from dora_rl.config import RewardConfig
    from dora_rl.rewards.weighted import WeightedSum


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """One finished response with its row of the data.

    `prompt` is what the user wrote (string or messages), `prompt_text` what the model read.

        ScoreItem("1+1=", "1+1=", "2", (17,), answer="2", columns={"level": 1}, finish="stop")
    """

    prompt: str | list[dict[str, Any]]
    prompt_text: str
    completion: str
    completion_ids: tuple[int, ...] = ()
    answer: str | None = None
    columns: dict[str, object] = field(default_factory=dict[str, object])
    finish: str = "stop"


@dataclass(frozen=True, slots=True)
class ScoreError:
    """Why a sample has no score. `abstained`: the function returned None, as TRL allows, for a
    sample that is not its business; in a weighted sum the others then speak alone."""

    reason: str
    abstained: bool = False


class Reward(Protocol):
    """Anything that scores. Not thread-safe: one worker, one reward."""

    name: str

    @property
    def many(self) -> bool:
        """Whether many samples in one call are faster than one by one."""
        ...

    def score(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]: ...
    def missing(self, columns: Collection[str]) -> list[str]:
        """Columns the reward cannot do without and the data do not have; checked at the start."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CallLimits:
    """How long one call may take, how often it is tried, how many run at once."""

    timeout_s: float = 30.0
    # 0: three for functions that wait for others (asynchronous ones, the judge), otherwise one.
    attempts: int = 0
    retry_wait_s: float = 0.5
    concurrent_max: int = 16


def build(config: RewardConfig, base_dir: Path = Path(".")) -> WeightedSum:
    """The reward of a run: the weighted sum of `config.functions`; mistakes are a `UserError`."""
    from dora_rl.rewards.weighted import build_sum

    return build_sum(config, base_dir)


def load_reward(
    spec: str,
    base_dir: Path = Path("."),
    *,
    form: str = "auto",
    options: Mapping[str, Any] | None = None,
    limits: CallLimits | None = None,
) -> Reward:
    """The reward that `spec` names: `path/to/file.py:name`, `package.module:name` or a built-in.

    `options` are the arguments of a built-in, or keyword arguments of the user's function.
    """
    from dora_rl.rewards.builtin import make_builtin
    from dora_rl.rewards.function import FunctionReward

    limits = limits or CallLimits()
    if not re.fullmatch(r".+:[A-Za-z_][\w.]*", spec):
        return make_builtin(spec, base_dir, options or {}, limits)
    function = load_function(spec, base_dir)
    return FunctionReward(spec, function, form=form, options=options or {}, limits=limits)


def load_function(spec: str, base_dir: Path) -> Callable[..., Any]:
    """Import what `file.py:name` or `package.module:name` names; failures are one line."""
    found = load_object(spec, base_dir, section="reward", key="reward.functions")
    if not callable(found):
        raise UserError(f"reward: {spec} is a {type(found).__name__}; give a function")
    return found
