"""The workers that a run needs: started together, and looked after while it goes on."""

from __future__ import annotations

import secrets
import shutil
import sys
from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.controller.env_relay import EnvRelay
from dora_rl.controller.evaluation import KeptVersions
from dora_rl.controller.scoring import ScoringPool
from dora_rl.observe.meters import start_meter
from dora_rl.setup.devices import Mps
from dora_rl.setup.layout import Layout
from dora_rl.types import UserError
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


class Ranks:
    """One worker each, named as the layout says."""

    def __init__(self, workers: Workers, layout: Layout, run_dir: Path) -> None:
        self._workers, self._layout, self._run_dir = workers, layout, run_dir

    def start(self) -> None:
        """All ranks begin together; one that is still there ends first."""
        rendezvous = prepare_rendezvous(self._run_dir)
        names = self._layout.learners
        for name in names:
            if name in self._workers.workers:
                self._workers.kill(name)
        for name in names:
            self._workers.start("learner", name, self._layout.learner_extra(name, rendezvous))

    @property
    def names(self) -> tuple[str, ...]:
        return self._layout.learners


def prepare_rendezvous(run_dir: Path) -> Path:
    """A file that no group of ranks has used, where the next one finds itself together."""
    folder = run_dir / "meeting"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    return folder / secrets.token_hex(8)


class GpuUse:
    """From the start of a run to its end; nothing at all on a CPU."""

    def __init__(self, device: str, *, mps: bool | str) -> None:
        """`mps`: see `runtime.mps`."""
        self._mps: Mps | None = None
        if mps and device != "cpu":
            try:
                self._mps = Mps()
            except UserError as error:
                if mps != "auto":
                    raise
                print(f"dora-rl: {error}: learner and instances take turns", file=sys.stderr)
        self._meter = start_meter(device)

    def end(self, since_s: float | None, until_s: float) -> float | None:
        """The idle ratio in the training time, where the run used a GPU."""
        if self._mps is not None:
            self._mps.end()
        if self._meter is None:
            return None
        self._meter.end()
        return self._meter.idle_ratio(since_s, until_s) if since_s else None
