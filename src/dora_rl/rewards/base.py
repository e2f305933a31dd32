"""Rewards: what is scored, what comes back, how a function is found by name, and their sum.

A reward turns finished responses into numbers. `score` never raises for a bad sample: a function
that raises, hangs or returns no finite number ends that sample alone, as a `ScoreError` with a
reason. Never scores a sample twice where a cache is on and the samples are equal. Invariants:
`score(items)` returns exactly one entry for each item, in order; the total of a run's reward is
the sum over the functions that did not abstain, and if one fails, the sample fails, with its name.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dora_rl.config import RewardConfig
from dora_rl.user_code import load_object, require

# A score of these is dear and depends on the sample alone.
CACHED_BY_DEFAULT = ("code", "judge", "model")


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


class Reward:
    """Anything that scores. Not thread-safe: one worker, one reward."""

    name: str
    many = False  # whether many samples in one call are faster than one by one
    needs_answer = False  # whether a row without an answer cannot be scored
    how = "built-in"  # what it is and how it is called, for `dora-rl check`
    num_threads = 1  # in which samples are scored

    def score(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        if len(items) < 2 or self.num_threads == 1:
            return [self.score_one(item) for item in items]
        with ThreadPoolExecutor(self.num_threads) as pool:
            return list(pool.map(self.score_one, items))

    def score_one(self, item: ScoreItem) -> float | ScoreError:
        raise NotImplementedError

    def missing(self, columns: Collection[str]) -> list[str]:
        """Columns the reward cannot do without and the data do not have; checked at the start."""
        return []

    def close(self) -> None:
        """Let go of what it holds."""


class CachedReward(Reward):
    """Remembers the newest `entries_max` scores. Failures are not remembered."""

    def __init__(self, reward: Reward, entries_max: int) -> None:
        self.name, self.how = reward.name, reward.how
        self.many, self.needs_answer = reward.many, reward.needs_answer
        self.inner, self.missing, self.close = reward, reward.missing, reward.close
        self._entries_max = entries_max
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        self.num_hits = 0

    def score(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        keys = [item_key(item) for item in items]
        fresh: dict[bytes, ScoreItem] = {}
        for key, item in zip(keys, items, strict=True):
            if key in self._scores:
                self._scores.move_to_end(key)
            else:
                fresh.setdefault(key, item)
        self.num_hits += len(items) - len(fresh)
        made = dict(zip(fresh, self.inner.score(list(fresh.values())), strict=True))
        scores = [made[key] if key in made else self._scores[key] for key in keys]
        self._scores.update({k: s for k, s in made.items() if not isinstance(s, ScoreError)})
        while len(self._scores) > self._entries_max:
            self._scores.popitem(last=False)
        return scores


def item_key(item: ScoreItem) -> bytes:
    """A digest of everything a reward can see."""
    seen = [item.prompt, item.completion, item.completion_ids, item.answer, item.columns]
    text = json.dumps([*seen, item.finish], sort_keys=True, default=repr)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Score:
    """The total, or why there is none, and what each function gave (unweighted)."""

    total: float | ScoreError
    parts: dict[str, float] = field(default_factory=dict[str, float])


class WeightedSum(Reward):
    """What `build` makes: the functions, one after the other, and their weighted sum."""

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float]) -> None:
        assert rewards and len(rewards) == len(weights)
        self.name = " + ".join(reward.name for reward in rewards)
        self.rewards, self.weights = tuple(rewards), tuple(weights)
        self.many = any(reward.many for reward in rewards)

    def missing(self, columns: Collection[str]) -> list[str]:
        return list(dict.fromkeys(name for one in self.rewards for name in one.missing(columns)))

    def close(self) -> None:
        for reward in self.rewards:
            reward.close()

    def score(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        return [score.total for score in self.score_parts(items)]

    def score_parts(self, items: Sequence[ScoreItem]) -> list[Score]:
        """The same with each function's own score, for the metrics."""
        columns = [reward.score(items) for reward in self.rewards]
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def _sum(self, row: Sequence[float | ScoreError]) -> Score:
        total, parts = 0.0, dict[str, float]()
        for reward, weight, score in zip(self.rewards, self.weights, row, strict=True):
            if not isinstance(score, ScoreError):
                parts[reward.name] = score
                total += weight * score
            elif not score.abstained:
                return Score(ScoreError(f"reward {reward.name} {score.reason}"), parts)
        if not parts:
            return Score(ScoreError(f"reward {self.name}: no function gave a score", True))
        return Score(total, parts)

    def describe(self) -> list[str]:
        """A line for each function: what it is, and how it will be called."""
        return [
            f"reward {one.name}: {one.how}, weight {weight:g}"
            for one, weight in zip(self.rewards, self.weights, strict=True)
        ]

    def needing_answer(self) -> list[str]:
        """The functions that cannot score a row without an answer."""
        return [reward.name for reward in self.rewards if reward.needs_answer]


def build(config: RewardConfig, base_dir: Path = Path(".")) -> WeightedSum:
    """The reward of a run: the weighted sum of `config.functions`. Every mistake in the section or
    in the functions' signatures is a `UserError`."""
    names = [entry.label or entry.name for entry in config.functions]
    twice = [name for name in names if names.count(name) > 1]
    require(
        (
            names,
            'reward: no function; set reward.functions = ["path/to/file.py:name"] or a built-in',
        ),
        (
            not twice,
            f"reward: two functions are called {(twice or [''])[0]!r}; give one of them a label",
        ),
    )
    rewards: list[Reward] = []
    for entry, name in zip(config.functions, names, strict=True):
        reward = load_reward(
            entry.name, base_dir, form=entry.form, options=entry.options, limits=config
        )
        reward.name = name
        cached = entry.name in CACHED_BY_DEFAULT if entry.cache is None else entry.cache
        most = config.cache_entries_max if cached else 0
        rewards.append(CachedReward(reward, most) if most else reward)
    return WeightedSum(rewards, [entry.weight for entry in config.functions])


def load_reward(
    spec: str,
    base_dir: Path = Path("."),
    *,
    form: str = "auto",
    options: Mapping[str, Any] | None = None,
    limits: RewardConfig | None = None,
) -> Reward:
    """The reward that `spec` names: `path/to/file.py:name`, `package.module:name` or a built-in.

    `options` are the arguments of a built-in, or keyword arguments of the user's function. `limits`
    say how long one call may take, how often it is tried and how many run at once.
    """
    from dora_rl.rewards.builtin import make_builtin
    from dora_rl.rewards.function import FunctionReward

    if not re.fullmatch(r".+:[A-Za-z_][\w.]*", spec):
        return make_builtin(spec, base_dir, options or {}, limits or RewardConfig())
    found = load_object(spec, base_dir, section="reward", key="reward.functions")
    require((callable(found), f"reward: {spec} is a {type(found).__name__}; give a function"))
    return FunctionReward(spec, found, form=form, options=options, limits=limits)
