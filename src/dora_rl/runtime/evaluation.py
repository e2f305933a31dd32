"""Held-out evaluation beside training: which version, which prompts, what came of it.

An evaluation pins the weights it reads, not a place in the window: the version's files stay until
the evaluator has loaded them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dora_rl.runtime.crew import Crew
from dora_rl.runtime.scoring import ScoringPool
from dora_rl.runtime.turns import row_of
from dora_rl.types import Prompt, Version

NAME = "evaluator"
FIGURES = ["greedy", "sampled", "pass_at_k", "tail_greedy", "tail_sampled"]
ATTEMPTS_MAX = 3  # of one evaluation whose evaluator dies


@dataclass(slots=True)
class Sheet:
    """The answers to one prompt; rewards come in one by one."""

    prompt: Prompt
    greedy: float = 0.0
    sampled: list[float] = field(default_factory=list[float])
    greedy_tokens: int = 0


class Evaluations:
    """One at a time; newer requests wait, and only the newest of those is kept."""

    def __init__(
        self,
        crew: Crew,
        pool: ScoringPool,
        prompts: Sequence[Prompt],
        num_samples: int,
        decode: Callable[[Sequence[int]], str],
        done: Callable[[Version, dict[str, float]], None],
        extra: dict[str, Any],
    ) -> None:
        self._crew, self._pool, self._prompts = crew, pool, prompts
        self._num_samples, self._decode, self._done = num_samples, decode, done
        self._has_functions = bool(extra["has_functions"])
        self._ready = False
        self._waiting: list[Version] = []
        self.running: Version | None = None
        self.pinned: Version | None = None
        self._sheets: list[Sheet] = []
        self._open = 0
        self._extra = extra
        self._attempts: Counter[Version] = Counter()
        self._generating = False
        self._heard_s = time.monotonic()

    def start(self) -> None:
        self._crew.start("evaluator", NAME, self._extra)

    @property
    def idle(self) -> bool:
        return self.running is None and not self._waiting

    def ask(self, version: Version) -> None:
        if version != self.running and version not in self._waiting:
            self._waiting.append(version)
            self._next()

    def pins(self) -> set[Version]:
        """Versions whose files must stay."""
        return set(self._waiting) | ({self.pinned} if self.pinned is not None else set())

    def _next(self) -> None:
        if not self._ready or self.running is not None or not self._waiting:
            return
        self.running = self.pinned = self._waiting.pop(0)
        prompts = [list(prompt.token_ids) for prompt in self._prompts]
        rows = [{**row_of(prompt), "env": prompt.env} for prompt in self._prompts]
        body = {"version": self.running, "prompts": prompts, "num_samples": self._num_samples}
        body |= {"rows": rows}
        self._generating, self._heard_s = True, time.monotonic()
        self._crew.send(NAME, "evaluate", body)

    def check_time(self, limit_s: float) -> None:
        """End an evaluator that generates and has said nothing for too long."""
        if self._generating and time.monotonic() - self._heard_s > limit_s:
            self._generating = False
            self._crew.kill(NAME)

    def hear(self, kind: str, body: dict[str, Any]) -> None:
        self._heard_s = time.monotonic()
        if kind == "ready":
            self._ready = True
            self._next()
        elif kind == "loaded":
            self.pinned = None
        elif kind == "evaluated":
            self._generating = False
            self._score(body["answers"])

    def lost(self) -> None:
        """The evaluator died: the evaluation it was at begins again, a few times."""
        self._ready = False
        if self.running is not None and self._generating:
            self._attempts[self.running] += 1
            if self._attempts[self.running] < ATTEMPTS_MAX:
                self._waiting.insert(0, self.running)
            self.running = self.pinned = None
        self._generating = False
        self._crew.restart(NAME)

    def give_up(self) -> None:
        """No evaluator can be had: nothing waits for one any more."""
        self._waiting.clear()
        self.running = self.pinned = None

    def _score(self, answers: list[dict[str, Any]]) -> None:
        self._sheets = [Sheet(prompt) for prompt in self._prompts]
        self._open = sum(1 + len(answer["sampled"]) for answer in answers)
        for sheet, answer in zip(self._sheets, answers, strict=True):
            sheet.greedy_tokens = len(answer["greedy"])
            known = answer["rewards"]
            self._submit(sheet, answer["greedy"], known[0], sampled=False)
            for ids, reward in zip(answer["sampled"], known[1:], strict=True):
                self._submit(sheet, ids, reward, sampled=True)

    def _submit(self, sheet: Sheet, ids: list[int], known: float | None, *, sampled: bool) -> None:
        """Score an answer, unless its environment did (`known`)."""

        def answer(reward: float | None, why: str) -> None:
            del why  # an unscored answer counts as wrong
            if sampled:
                sheet.sampled.append(reward or 0.0)
            else:
                sheet.greedy = reward or 0.0
            self._open -= 1
            if not self._open:
                self._finish()

        if known is not None or not self._has_functions:
            answer(known, "")
            return
        array = np.asarray(ids, dtype=np.int32)
        self._pool.submit(sheet.prompt, self._decode(ids), array, "stop", answer)

    def _finish(self) -> None:
        version, self.running = self.running, None
        if version is not None:
            self._done(version, figures(self._sheets))
        self._next()


def due(newest: Version, every_steps: int, last: Version) -> list[Version]:
    """Versions up to `newest` that are to be evaluated: the first, the last, every so many.

    >>> due(7, 3, 10)
    [0, 3, 6]
    """
    wanted = {0, last} | set(range(every_steps, last, every_steps) if every_steps else ())
    return sorted(version for version in wanted if version <= newest)


def figures(sheets: Sequence[Sheet]) -> dict[str, float]:
    """Mean rewards, pass@k, and the same for the hardest tenth of the prompts.

    Hardest: by the data's `difficulty` column where there is one, else by length of the answer.
    """

    def hardness(sheet: Sheet) -> float:
        level = sheet.prompt.columns.get("difficulty")
        return float(level) if isinstance(level, int | float) else float(sheet.greedy_tokens)

    ordered = sorted(sheets, key=hardness)
    tail = ordered[-max(1, len(ordered) // 10) :]
    lengths = np.array([sheet.greedy_tokens for sheet in sheets])
    return {
        "greedy": float(np.mean([s.greedy for s in sheets])),
        "sampled": float(np.mean([r for s in sheets for r in s.sampled])),
        "pass_at_k": float(np.mean([max(s.sampled) for s in sheets])),
        "tail_greedy": float(np.mean([s.greedy for s in tail])),
        "tail_sampled": float(np.mean([r for s in tail for r in s.sampled])),
        "length_median": float(np.median(lengths)),
        "length_p99": float(np.percentile(lengths, 99)),
        "num_prompts": float(len(sheets)),
    }
