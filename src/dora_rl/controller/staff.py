"""The workers that a run needs: started together, and looked after while it goes on."""

from __future__ import annotations

from dora_rl.config import RunConfig
from dora_rl.controller.env_relay import EnvRelay
from dora_rl.controller.kept_versions import KeptVersions
from dora_rl.controller.ranks import Ranks
from dora_rl.controller.scoring import ScoringPool
from dora_rl.setup.layout import Layout
from dora_rl.workers.pool import Workers


class Staff:
    """Who is started when, and who has taken too long."""

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        workers: Workers,
        ranks: Ranks,
        scoring: ScoringPool,
        envs: EnvRelay,
        kept: KeptVersions,
    ) -> None:
        self._limits, self._layout, self._workers = config.orchestration, layout, workers
        self._ranks, self._scoring, self._envs, self._kept = ranks, scoring, envs, kept

    def start_training(self) -> None:
        self._ranks.start()
        for name in self._layout.instances:
            self._workers.start("instance", name, self._layout.instance_extra(name))
        self._envs.start()

    def start_scoring(self) -> None:
        """What evaluations need too, where only those are left to do."""
        self._scoring.start()
        if self._kept.evaluations is not None:
            self._kept.evaluations.start()

    def check_time(self) -> None:
        """Whoever keeps the run waiting past its time is replaced; ends come through the inbox."""
        self._scoring.check_time()
        self._envs.check_time()
        if self._kept.evaluations is not None:
            self._kept.evaluations.check_time(self._limits.report_timeout_s)
        for name in self._workers.overdue(self._limits.load_timeout_s):
            self._workers.kill(name)

    @property
    def num_answered(self) -> int:
        return self._scoring.num_answered + self._envs.num_answered

    def waits(self) -> list[str]:
        """Who waits for whom, beside what the core knows."""
        return self._envs.waits()

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is still to come."""
        return self._kept.evaluations is not None and not self._kept.evaluations.idle

    def end(self, grace_s: float) -> None:
        self._workers.end(grace_s)

    def kill_all(self) -> None:
        self._workers.kill_all()
