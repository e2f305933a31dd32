"""Held-out evaluation beside training: which version, which prompts, what came of it.

An evaluation pins the weights it reads, not a place in the window: the version's files stay until
its score is known, because the best evaluated version is kept. Invariant: every evaluation that was
asked for is reported once, with its figures or as failed. Which versions are kept and let go
follows from that and from the core (`KeptVersions`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dora_rl.config import EvaluationConfig, RunConfig
from dora_rl.controller.run_dir import RunFiles
from dora_rl.controller.scoring import ScoringPool
from dora_rl.controller.world import Carrier, Notify
from dora_rl.data.prompts import PromptSource
from dora_rl.observe.eval_figures import (
    TAIL_FILE,
    Figures,
    Sheet,
    TailPrompts,
    best_evaluated,
    failed_figures,
    figures,
    has_failed,
)
from dora_rl.types import Prompt, Trajectory, Version
from dora_rl.workers.environment import row_of
from dora_rl.workers.messages import (
    EvalPrompt,
    Evaluate,
    Evaluated,
    Message,
    Rate,
    Ready,
    Reward,
)
from dora_rl.workers.pool import Worker, Workers

NAME = "evaluator"
NO_REWARD = "its environment gave no reward, and reward.functions is empty"
ATTEMPTS_MAX = 3  # of one evaluation whose evaluator dies


class Evaluations:
    """One at a time; newer requests wait, and only the newest of those is kept."""

    def __init__(
        self,
        workers: Workers,
        scoring: ScoringPool,
        prompts: Sequence[Prompt],
        section: EvaluationConfig,
        tail: TailPrompts,
        decode: Callable[[Sequence[int]], str],
        done: Callable[[Version, Figures], None],
        extra: dict[str, Any],
        checksums: Mapping[Version, str],
    ) -> None:
        """`checksums`: of versions, as the log has them."""
        self._workers, self._scoring, self._prompts = workers, scoring, prompts
        self._checksums = checksums
        self._section, self._tail, self._decode, self._done = section, tail, decode, done
        self._ready = False
        self._waiting: list[Version] = []
        self.running: Version | None = None
        self._sheets: list[Sheet] = []
        self._open = 0
        self._extra = extra
        self._attempts: Counter[Version] = Counter()
        self._generating = False
        self._heard_s = self._workers.now()

    def start(self) -> None:
        self._workers.start("evaluator", NAME, self._extra)

    @property
    def idle(self) -> bool:
        return self.running is None and not self._waiting

    def ask(self, version: Version) -> None:
        if version != self.running and version not in self._waiting:
            self._waiting.append(version)
            self._next()

    def pins(self) -> set[Version]:
        """Versions whose files must stay."""
        return set(self._waiting) | ({self.running} if self.running is not None else set())

    def _next(self) -> None:
        if not self._ready or self.running is not None or not self._waiting:
            return
        self.running = self._waiting.pop(0)
        prompts = tuple(EvalPrompt(row_of(prompt), prompt.env) for prompt in self._prompts)
        self._generating, self._heard_s = True, self._workers.now()
        committed = self._checksums.get(self.running, "")
        asked = Evaluate(self.running, prompts, self._section.num_samples, committed)
        self._workers.send(NAME, asked)

    def check_time(self, limit_s: float) -> None:
        """End an evaluator that generates and has said nothing for too long."""
        if self._generating and self._workers.now() - self._heard_s > limit_s:
            self._generating = False
            self._workers.kill(NAME)

    def hear(self, worker: Worker, message: Message) -> None:
        """What the evaluator says; anything shows that it is alive."""
        self._heard_s = self._workers.now()
        match message:
            case Ready():
                self._ready = True
                self._next()
            case Evaluated(samples=samples):
                self._generating = False
                self._score(samples)

    def lost(self, why: str = "") -> None:
        """The evaluator died: the evaluation it was at begins again, a few times."""
        self._ready = False
        version = self.running if self._generating else None
        self._generating = False
        if version is not None:
            self.running = None
            self._attempts[version] += 1
            if self._attempts[version] < ATTEMPTS_MAX:
                self._waiting.insert(0, version)
            else:
                last = f", the last time: {why}" if why else ""
                times = f"the evaluator ended {ATTEMPTS_MAX} times while it answered"
                self._failed(version, times + last)
        self._workers.restart(NAME)

    def give_up(self) -> None:
        """No evaluator can be had: what waits for one has failed, and nothing waits any more."""
        due, self._waiting = self._waiting, []
        if self.running is not None and self._generating:
            due, self.running = [self.running, *due], None
        self._generating = False
        for version in due:
            self._failed(version, "the evaluator cannot be started")

    def _failed(self, version: Version, why: str) -> None:
        self._done(version, failed_figures(len(self._prompts), self._section.num_samples, why))

    def _score(self, samples: Sequence[Trajectory]) -> None:
        self._sheets, self._open = sheets_of(self._prompts, samples), len(samples)
        for sample in samples:
            self._submit(sample, self._sheets[sample.request.group], sample.request.sample)

    def _submit(self, sample: Trajectory, sheet: Sheet, place: int) -> None:
        """Score an answer, unless it failed or its environment did. Place 0 is the greedy one."""

        def answer(reward: Reward) -> None:
            write_down(sheet, place, reward)
            self._open -= 1
            if not self._open:
                self._finish()

        if sample.failure:
            answer(Reward(error=sample.failure))
        elif sample.reward is not None or not self._scoring.names:
            answer(Reward(sample.reward, NO_REWARD))
        else:
            text = self._decode(sample.token_ids.tolist())
            self._scoring.submit(sheet.prompt, replace(sample, text=text), answer)

    def _finish(self) -> None:
        version, self.running = self.running, None
        if version is not None:
            self._done(version, self._figures(version))
        self._next()

    def _figures(self, version: Version) -> Figures:
        found = figures(self._sheets, self._tail.indexes, self._section)
        if self._tail.indexes is None and found["greedy"] is not None:
            tail = self._tail.choose(version, self._sheets)
            found = figures(self._sheets, tail, self._section)
        return found


def sheets_of(prompts: Sequence[Prompt], samples: Sequence[Trajectory]) -> list[Sheet]:
    """A sheet for each prompt, still without scores. Sample 0 is the greedy one."""
    each = len(samples) // len(prompts)
    return [
        Sheet(prompt, greedy_tokens=len(greedy.token_ids), sampled=[None] * (each - 1))
        for prompt, greedy in zip(prompts, samples[::each], strict=True)
    ]


def write_down(sheet: Sheet, place: int, reward: Reward) -> None:
    if reward.total is None:
        sheet.failures.append(reward.error or "it has no reward")
    elif place:
        sheet.sampled[place - 1] = reward.total
    else:
        sheet.greedy = reward.total


def due(newest: Version, every_steps: int, last: Version) -> list[Version]:
    """Versions up to `newest` that are to be evaluated: the first, the last, every so many.

    >>> due(7, 3, 10)
    [0, 3, 6]
    """
    wanted = {0, last} | set(range(every_steps, last, every_steps) if every_steps else ())
    return sorted(version for version in wanted if version <= newest)


class KeptVersions:
    """`evaluations` None: the run has none."""

    def __init__(
        self, config: RunConfig, files: RunFiles, carrier: Carrier, workers: Workers, notify: Notify
    ) -> None:
        self._config, self._files = config, files
        self._carrier, self._workers, self._notify = carrier, workers, notify
        self.evaluations: Evaluations | None = None

    def evaluate_on(
        self,
        source: PromptSource,
        scoring: ScoringPool,
        decode: Callable[[Sequence[int]], str],
        extra: dict[str, Any],
    ) -> Evaluations:
        """The run has evaluations, on these prompts. `extra`: what their worker is told."""
        section = self._config.evaluation
        prompts = list(source.once(section.num_prompts))[: section.num_prompts]
        tail = TailPrompts(prompts, self._files.run_dir / TAIL_FILE)
        parts = (prompts, section, tail, decode, self.evaluated, extra, self._files.checksums)
        self.evaluations = Evaluations(self._workers, scoring, *parts)
        return self.evaluations

    def missing(self, newest: Version) -> list[Version]:
        """Wanted by the configuration, not done or failed, and still possible: a crash came
        between."""
        done, there = self._files.records.totals.evaluations, self._files.versions.disk.versions()
        every, last = self._config.evaluation.every_steps, self._files.params.num_steps
        return [
            version
            for version in (due(newest, every, last) if self.evaluations is not None else ())
            if version in there and (version not in done or has_failed(done[version]))
        ]

    def ask(self, version: Version) -> None:
        """An evaluation, if it is wanted and missing. The evaluator reads it from the disk."""
        if version in self.missing(version) and self.evaluations is not None:
            self.evaluations.ask(version)

    def hear(self, worker: Worker, message: Message) -> None:
        """What the evaluator says."""
        assert self.evaluations is not None
        self.evaluations.hear(worker, message)
        self.retire_unpinned()

    def evaluated(self, version: Version, figures: Figures) -> None:
        self._files.records.evaluation(version, figures)
        score = figures.get(self._config.checkpoint.best_metric.removeprefix("eval/"))
        if isinstance(score, int | float) and version:
            self._workers.send("learner", Rate(version - 1, score))
        self._notify.on_step({"version": version, **{f"eval/{k}": v for k, v in figures.items()}})
        self.retire_unpinned()

    def best(self) -> set[Version]:
        """The best version that was evaluated, whose weights stay until there is a better one."""
        section = self._config.checkpoint
        done = self._files.records.totals.evaluations if section.keep_best else {}
        best = best_evaluated(done, section.best_metric, is_max=section.best_is_max)
        return {best[0]} if best is not None else set()

    def retire(self, version: Version) -> None:
        self._files.versions.to_retire.add(version)
        self.retire_unpinned()

    def retire_unpinned(self) -> None:
        pins = self.evaluations.pins() if self.evaluations is not None else set[Version]()
        self._carrier.retire(self._files.versions.retire_all_but(pins | self.best()))
