"""The reward of a run: a weighted sum of functions, with remembered scores.

Never scores a sample twice where a cache is on and the samples are equal. Invariant: the total is
the sum over the functions that did not abstain; if one fails, the sample fails, with its name.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from dora_rl.config import RewardConfig, RewardFunction
from dora_rl.rewards.base import CallLimits, Reward, ScoreError, ScoreItem, load_reward
from dora_rl.rewards.function import FunctionReward
from dora_rl.types import UserError

# A score of these is dear and depends on the sample alone.
CACHED_BY_DEFAULT = ("code", "judge", "model")


@dataclass(frozen=True, slots=True)
class Score:
    """The total, or why there is none, and what each function gave (unweighted)."""

    total: float | ScoreError
    parts: dict[str, float] = field(default_factory=dict[str, float])


class CachedReward:
    """Remembers the newest `entries_max` scores. Failures are not remembered."""

    def __init__(self, reward: Reward, entries_max: int) -> None:
        self.name = reward.name
        self.inner = reward
        self._entries_max = entries_max
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        self.num_hits = 0
        self.many = reward.many

    def missing(self, columns: Collection[str]) -> list[str]:
        return self.inner.missing(columns)

    def close(self) -> None:
        self.inner.close()

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


class WeightedSum:
    """What `base.build` makes: the functions, one after the other, and their weighted sum."""

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float]) -> None:
        assert rewards and len(rewards) == len(weights)
        self.name = " + ".join(reward.name for reward in rewards)
        self.rewards = tuple(rewards)
        self.weights = tuple(weights)
        self.many = any(reward.many for reward in rewards)

    def missing(self, columns: Collection[str]) -> list[str]:
        found = [name for reward in self.rewards for name in reward.missing(columns)]
        return list(dict.fromkeys(found))

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


def describe(reward: WeightedSum, config: RewardConfig) -> list[str]:
    """A line for each function: what it is, and how it will be called."""
    lines: list[str] = []
    for entry, one in zip(config.functions, reward.rewards, strict=True):
        inner = one.inner if isinstance(one, CachedReward) else one
        text = "built-in"
        if isinstance(inner, FunctionReward):
            how = "found by its parameters" if entry.form == "auto" else "as configured"
            text = f"form {inner.form.value}, {how} ({', '.join(inner.arguments)})"
        lines.append(f"reward {one.name}: {text}, weight {entry.weight:g}")
    return lines


def needing_answer(reward: WeightedSum) -> list[str]:
    """The functions that cannot score a row without an answer."""
    inner = [one.inner if isinstance(one, CachedReward) else one for one in reward.rewards]
    return [one.name for one in inner if getattr(one, "needs_answer", False)]


def build_sum(config: RewardConfig, base_dir: Path) -> WeightedSum:
    """The run's reward; every mistake in the section or in the functions' signatures is told."""
    if not config.functions:
        raise UserError(
            'reward: no function; set reward.functions = ["path/to/file.py:name"] or a built-in'
        )
    names = [entry.label or entry.name for entry in config.functions]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"reward: two functions are called {name!r}; give one of them a label")
    rewards = [_one(config, entry, base_dir) for entry in config.functions]
    return WeightedSum(rewards, [entry.weight for entry in config.functions])


def _one(config: RewardConfig, entry: RewardFunction, base_dir: Path) -> Reward:
    limits = CallLimits(
        timeout_s=config.timeout_s,
        attempts=config.attempts,
        retry_wait_s=config.retry_wait_s,
        concurrent_max=config.concurrent_max,
    )
    reward = load_reward(
        entry.name, base_dir, form=entry.form, options=entry.options, limits=limits
    )
    reward.name = entry.label or entry.name
    cached = entry.name in CACHED_BY_DEFAULT if entry.cache is None else entry.cache
    if cached and config.cache_entries_max:
        return CachedReward(reward, config.cache_entries_max)
    return reward
