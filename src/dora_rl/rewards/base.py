"""Rewards: what is scored, what comes back, and how a function is found by name.

A reward turns finished responses into numbers. `score` never raises for a bad sample: a function
that raises, hangs or returns no finite number ends that sample alone, as a `ScoreError` with a
reason. Invariant: `score(items)` returns exactly one entry for each item, in order.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from dora_rl.types import UserError

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
    place, _, name = spec.rpartition(":")
    try:
        if place.endswith(".py"):
            found: Any = _load_file(base_dir / Path(place).expanduser())
        else:
            _search_in(base_dir)
            found = importlib.import_module(place)
        for part in name.split("."):
            found = getattr(found, part)
    except UserError:
        raise
    except Exception as error:
        # Importing runs the user's code, which may raise anything.
        raise UserError(
            f"reward: cannot load {spec} ({one_line(error)}); "
            f"give path/to/file.py:name or package.module:name"
        ) from error
    if not callable(found):
        raise UserError(f"reward: {spec} is a {type(found).__name__}; give a function")
    return found


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"reward: {path} does not exist; check reward.functions")
    path = path.resolve()
    # The name is unique to the file, so that two files called reward.py do not meet.
    digest = blake2b(str(path).encode(), digest_size=6).hexdigest()
    name = f"dora_rl_reward_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    _search_in(path.parent)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and typing look a class's module up by name while it is being executed.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search_in(directory: Path) -> None:
    """Reward files import their neighbours; last on the path, they shadow nothing."""
    place = str(directory.resolve())
    if place not in sys.path:
        sys.path.append(place)


def one_line(error: BaseException) -> str:
    """Kind and first line of an error that others raised."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
