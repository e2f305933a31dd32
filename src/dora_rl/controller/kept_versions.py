"""Which versions are evaluated, kept and let go.

A version's files stay while a group or an evaluation needs them, and the best evaluated version
stays until there is a better one. Everything else follows from the core's `RetireVersion`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.controller.eval_figures import (
    TAIL_FILE,
    Figures,
    TailPrompts,
    best_evaluated,
    has_failed,
)
from dora_rl.controller.evaluation import Evaluations, due
from dora_rl.controller.files import RunFiles
from dora_rl.controller.scoring import ScoringPool
from dora_rl.controller.world import Carrier, Notify
from dora_rl.data.prompts import PromptSource
from dora_rl.types import Version
from dora_rl.workers.messages import Message, Rate
from dora_rl.workers.pool import Worker, Workers


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
    ) -> None:
        """The run has evaluations, on these prompts. `extra`: what their worker is told."""
        section = self._config.evaluation
        prompts = list(source.once(section.num_prompts))[: section.num_prompts]
        tail = TailPrompts(prompts, self._files.run_dir / TAIL_FILE)
        self.evaluations = Evaluations(
            self._workers, scoring, prompts, section, tail, decode, self.evaluated, extra
        )

    def due(self, newest: Version) -> list[Version]:
        """Versions up to `newest` that the configuration wants evaluated."""
        every, last = self._config.evaluation.every_steps, self._files.params.num_steps
        return due(newest, every, last) if self.evaluations is not None else []

    def missing(self, newest: Version) -> list[Version]:
        """Due, not done or failed, and still possible: a crash came between."""
        done, there = self._files.records.totals.evaluations, self._files.versions.disk.versions()
        return [
            version
            for version in self.due(newest)
            if version in there and (version not in done or has_failed(done[version]))
        ]

    def ask(self, version: Version) -> None:
        assert self.evaluations is not None
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
        self._notify.step({"version": version, **{f"eval/{k}": v for k, v in figures.items()}})
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
