"""What an evaluation says: scores over the answers that were scored, and how many were not.

An answer that could not be generated or scored is `failed`, never 0. Where more than
`evaluation.failed_share_max` of the answers failed, the evaluation as a whole has: its scores are
None then, because those that are left may be the easy ones. Pure: nothing here reads or writes,
except `TailPrompts`, which remembers the tail of a run in `evaluation.json`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import comb
from pathlib import Path

import numpy as np

from dora_rl.config import EvaluationConfig
from dora_rl.io.append_log import replace_text
from dora_rl.types import Prompt, UserError, Version

SCORES = ["greedy", "sampled", "pass_at_k", "tail_greedy", "tail_sampled", "best_of_k"]
TAIL_FILE = "evaluation.json"
TAIL_SHARE = 10  # the hardest tenth

Figures = dict[str, float | str | None]
"""Of one evaluation. A score is None where it is not known; `failure` is a text."""


@dataclass(slots=True)
class Sheet:
    """The answers to one prompt; rewards come in one by one. None: that answer failed."""

    prompt: Prompt
    greedy: float | None = None
    sampled: list[float | None] = field(default_factory=list[float | None])
    greedy_tokens: int = 0
    failures: list[str] = field(default_factory=list[str])  # why, one entry for each None

    def scored(self) -> list[float]:
        return [reward for reward in self.sampled if reward is not None]


def figures(
    sheets: Sequence[Sheet], tail: Sequence[int] | None, section: EvaluationConfig
) -> Figures:
    """Mean rewards, pass@k, the same for the tail (indexes of sheets; None: not known), lengths,
    and what failed."""
    num_answers = sum(1 + len(sheet.sampled) for sheet in sheets)
    reasons = Counter(reason for sheet in sheets for reason in sheet.failures)
    lengths = np.array([sheet.greedy_tokens for sheet in sheets])
    found: Figures = dict.fromkeys(SCORES)
    if reasons.total() <= section.failed_share_max * num_answers:
        found |= _scores(sheets, section.success_min)
        if tail is not None:
            hardest = [sheets[index] for index in tail]
            found["tail_greedy"] = _mean([s.greedy for s in hardest])
            found["tail_sampled"] = _mean([r for s in hardest for r in s.sampled])
    found |= {
        "length_median": float(np.median(lengths)),
        "length_p99": float(np.percentile(lengths, 99)),
        "num_prompts": float(len(sheets)),
        "num_answers": float(num_answers),
        "num_failed": float(reasons.total()),
    }
    return found | ({"failure": reasons.most_common(1)[0][0]} if reasons else {})


def failed_figures(num_prompts: int, num_samples: int, why: str) -> Figures:
    """Of an evaluation without a single answer: its evaluator ended."""
    num_answers = float(num_prompts * (1 + num_samples))
    counts = {"num_prompts": float(num_prompts), "num_answers": num_answers}
    return {**dict.fromkeys(SCORES), **counts, "num_failed": num_answers, "failure": why}


def has_failed(found: Figures) -> bool:
    """Whether the evaluation as a whole has. Those of older releases have no count."""
    return bool(found.get("num_failed")) and all(found.get(name) is None for name in SCORES)


FALLBACK_METRIC = "eval/sampled"  # where the configured one was never measured


def best_evaluated(
    evaluations: Mapping[Version, Figures], metric: str, *, is_max: bool
) -> tuple[Version, str, float] | None:
    """The version with the best score, the score's name and value; None: nothing was scored.

    Of equals the later one is best: it has learned from more.
    """
    for name in (metric, FALLBACK_METRIC):
        scores = {v: found.get(name.removeprefix("eval/")) for v, found in evaluations.items()}
        known = {v: float(score) for v, score in scores.items() if isinstance(score, int | float)}
        if known:
            sign = 1.0 if is_max else -1.0
            best = max(known, key=lambda version: (sign * known[version], version))
            return best, name, known[best]
    return None


def failed_text(found: Figures) -> str:
    """How many answers failed, and the most frequent reason; empty if none did."""
    failed, why = found.get("num_failed"), found.get("failure", "")
    return f"{failed:.0f} of {found['num_answers']:.0f} answers failed: {why}" if failed else ""


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _scores(sheets: Sequence[Sheet], success_min: float) -> Figures:
    most = max((len(sheet.sampled) for sheet in sheets), default=0)
    return {
        "greedy": _mean([sheet.greedy for sheet in sheets]),
        "sampled": _mean([reward for sheet in sheets for reward in sheet.sampled]),
        "pass_at_k": _over(sheets, most, lambda rewards: pass_at(rewards, most, success_min)),
        "best_of_k": _over(sheets, most, lambda rewards: best_of(rewards, most)),
    }


def curves(sheets: Sequence[Sheet], success_min: float) -> dict[str, float | None]:
    """pass@j and best@j for j = 1, 2, 4 … and k, unbiased."""
    num = max((len(sheet.sampled) for sheet in sheets), default=0)
    counts = sorted({1 << i for i in range(num.bit_length()) if 1 << i <= num} | {num} - {0})
    passes = (partial(pass_at, count=j, success_min=success_min) for j in counts)
    found = {f"pass@{j}": _over(sheets, j, of) for j, of in zip(counts, passes, strict=True)}
    return found | {f"best@{j}": _over(sheets, j, partial(best_of, count=j)) for j in counts}


def _over(sheets: Sequence[Sheet], count: int, of: Callable[[list[float]], float]) -> float | None:
    """The mean over the prompts with at least `count` scored samples."""
    rewards = [sheet.scored() for sheet in sheets]
    return _mean([of(one) for one in rewards if len(one) >= max(1, count)])


def pass_at(rewards: Sequence[float], count: int, success_min: float) -> float:
    """The probability that one of `count` samples passes, unbiased: a reward of at least
    `success_min` passes.

    >>> pass_at([0.0, 1.0], 1, 1.0), pass_at([0.0, 1.2], 2, 1.0), pass_at([0.5, 0.9], 2, 1.0)
    (0.5, 1.0, 0.0)
    """
    num_wrong = sum(reward < success_min - 1e-9 for reward in rewards)
    return 1.0 - comb(num_wrong, count) / comb(len(rewards), count)


def best_of(rewards: Sequence[float], count: int) -> float:
    """The expected best of `count` rewards among those given, unbiased.

    >>> best_of([0.2, 0.8], 1), best_of([0.2, 0.8], 2)
    (0.5, 0.8)
    """
    ordered, num = sorted(rewards), len(rewards)
    return sum(ordered[i] * comb(i, count - 1) for i in range(count - 1, num)) / comb(num, count)


class TailPrompts:
    """The hardest tenth of a run's evaluation prompts: the same prompts in every evaluation.

    By the data's `difficulty` where every row has one; otherwise those with the longest greedy
    answers in the first evaluation that did not fail, kept in the run directory.
    """

    def __init__(self, prompts: Sequence[Prompt], path: Path | None) -> None:
        self._path, self._num = path, len(prompts)
        ids = json.dumps([list(prompt.token_ids) for prompt in prompts])
        self._prompts = hashlib.sha256(ids.encode()).hexdigest()[:32]
        levels = [prompt.columns.get("difficulty") for prompt in prompts]
        by_level = [level for level in levels if isinstance(level, int | float)]
        self.indexes: list[int] | None = None
        if len(by_level) == len(levels):
            self.indexes = _last_tenth(by_level)
        elif path is not None and path.is_file():
            self.indexes = self._read(path)

    def _read(self, path: Path) -> list[int] | None:
        """Other prompts than those it was chosen from have another tail."""
        try:
            kept = json.loads(path.read_text())
            tail = list(map(int, kept["tail"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path} is damaged; restore it, or delete it: the hardest prompts are then chosen "
                "anew at the next evaluation"
            ) from None
        fits = kept.get("prompts") == self._prompts and all(0 <= i < self._num for i in tail)
        return tail if fits else None

    def choose(self, version: Version, sheets: Sequence[Sheet]) -> list[int]:
        """The tail; fixed now, by the lengths of these answers, if it is not yet."""
        if self.indexes is None:
            self.indexes = _last_tenth([sheet.greedy_tokens for sheet in sheets])
            kept = {"tail": self.indexes, "version": version, "prompts": self._prompts}
            if self._path is not None:
                replace_text(self._path, json.dumps(kept) + "\n")
        return self.indexes


def _last_tenth(hardness: Sequence[float]) -> list[int]:
    """Indexes of the hardest tenth, one at least; of equals the later ones."""
    order = sorted(range(len(hardness)), key=lambda index: hardness[index])
    return sorted(order[-max(1, len(order) // TAIL_SHARE) :])
