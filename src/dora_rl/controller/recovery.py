"""The workers of a run: started together, and replaced, given up or the run's end when they end.

A worker that ends three times before it is ready stops the run, resumable, with its name and its
last words. There is one exception: once a step was committed, an instance is left out instead while
others work, and tried again after every step, because only its host may have gone bad. Reward
workers stop the run when many end with no answer of any of them in between; a single end costs one
sample. Losses of learners and instances at work are counted by the core, which is told their last
words.
"""

from __future__ import annotations

import secrets
import shutil
import sys
from collections import Counter
from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.controller.evaluation import Evaluations, KeptVersions
from dora_rl.controller.loop import Control
from dora_rl.controller.scoring import EnvRelay, ScoringPool
from dora_rl.controller.world import Notify
from dora_rl.core import events as ev
from dora_rl.observe.meters import start_meter
from dora_rl.setup.devices import Mps
from dora_rl.setup.layout import Layout
from dora_rl.store.journals import Journals
from dora_rl.types import UserError
from dora_rl.workers.messages import Fatal
from dora_rl.workers.pool import Worker, Workers

RESTARTS_MAX = 20  # of the evaluator, while no step is committed
STARTS_MAX = 3  # of one worker that ends before it is ready
LOST_SCORERS_MAX = 3  # times the attempts of a sample, or the workers if they are more


class Recovery:
    """Counts the ends and acts on each."""

    def __init__(
        self,
        control: Control,
        workers: Workers,
        journals: Journals,
        ranks: Ranks,
        scoring: ScoringPool,
        envs: EnvRelay,
        notify: Notify,
    ) -> None:
        self._control, self._workers, self._journals = control, workers, journals
        self._ranks, self._scoring, self._envs, self._notify = ranks, scoring, envs, notify
        self.evaluations: Evaluations  # where the run has an evaluator
        self._num_restarts = 0
        self._num_starts: Counter[str] = Counter()
        self._has_committed = False
        self._left_out: list[str] = []

    def joined(self, worker: Worker) -> None:
        """A worker has said something: its start went well."""
        worker.joined = True
        self._num_starts.pop(worker.name, None)

    def committed(self) -> None:
        self._num_restarts, self._has_committed = 0, True
        again, self._left_out = self._left_out, []
        for name in again:
            self._workers.restart(name)

    def fatal(self, worker: Worker, said: Fatal) -> None:
        """A worker says why it ends. What is wrong from the start, or everywhere, ends the run."""
        bad_start = not worker.joined and not self._dispensable(worker)
        if said.ends_run or bad_start:
            self._control.handle(ev.StopRequested(f"{worker.name}: {said.reason}"))

    def lost(self, worker: Worker) -> None:
        """A process ended that should not have."""
        name, stop = worker.name, self._control.stop
        if self._workers.closing or (stop is not None and not stop.done):
            return
        self._num_starts[name] += 1
        self._num_restarts += worker.role == "evaluator"
        if self._num_starts[name] >= STARTS_MAX or self._num_restarts > RESTARTS_MAX:
            self._give_up(worker)
            return
        match worker.role:
            case "reward":
                self._lose_scorer(worker)
            case "env":
                self._envs.lost(name)
            case "evaluator":
                self.evaluations.lost(self._why(worker))
            case "learner" if stop is None:
                self._replace_learner(worker)
            case _ if stop is None:
                self._lose_instance(worker)
                if self._control.stop is None:
                    self._workers.restart(name)

    def _give_up(self, worker: Worker) -> None:
        name, why = worker.name, self._why(worker)
        if worker.role == "evaluator":
            self.evaluations.give_up()
            self._notify(f"evaluation given up; the evaluator keeps ending: {why}")
        elif self._num_restarts <= RESTARTS_MAX and self._dispensable(worker):
            self._lose_instance(worker)
            self._num_starts.pop(name)
            self._left_out.append(name)
            self._notify(f"{name} keeps ending and is left out for this step: {why}")
        else:
            self._control.handle(ev.StopRequested(f"{name} keeps ending: {why}"))

    def _lose_scorer(self, worker: Worker) -> None:
        """Many ends in a row are not the fault of single samples: nothing would ever be scored."""
        name, why, status = worker.name, self._why(worker), worker.process.poll()
        how = f" (status {status})" if status and status > 0 else ""
        self._scoring.lost(name)
        num = self._scoring.num_lost_in_a_row
        each = max(self._control.state.params.attempts_max, len(self._scoring.names))
        if num >= LOST_SCORERS_MAX * each:
            self._control.handle(
                ev.StopRequested(
                    f"reward workers ended {num} times with no score in between, the last one, "
                    f"{name}{how}: {why}; mend the reward and resume"
                )
            )

    def _why(self, worker: Worker) -> str:
        """Its own words, or how its process ended with what its log has: never nothing."""
        why, tail = worker.why_ended(), self._workers.log_tail(worker.name)
        return why if worker.last_words or not tail else f"{why}; its log ends: {tail}"

    def _dispensable(self, worker: Worker) -> bool:
        """An instance of a run that works, and others go on working."""
        works = any(
            other.role == "instance" and other.joined and other.process.poll() is None
            for other in self._workers.workers.values()
            if other is not worker
        )
        return worker.role == "instance" and self._has_committed and works

    def _replace_learner(self, worker: Worker) -> None:
        why, first = worker.why_ended(), self._workers.workers["learner"]
        self._control.handle(ev.LearnerLost(why, incarnation=first.incarnation))
        if self._control.stop is None:
            self._notify(f"the {worker.name} ended and begins again at the newest version: {why}")
            self._ranks.start()

    def _lose_instance(self, worker: Worker) -> None:
        self._journals.collect(worker.name, alive=set(self._control.state.groups))
        why, incarnation = worker.why_ended(), worker.incarnation
        self._control.handle(ev.InstanceLost(worker.name, why, incarnation=incarnation))


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


class Ranks:
    """One worker each, named as the layout says."""

    def __init__(self, workers: Workers, layout: Layout, run_dir: Path) -> None:
        self._workers, self._layout, self._folder = workers, layout, run_dir / "meeting"
        self.names = layout.learners

    def start(self) -> None:
        """All ranks begin together; one that is still there ends first."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, mode=0o700)
        # Where they find themselves together: a file that no ranks before have used.
        rendezvous = self._folder / secrets.token_hex(8)
        for name in self.names:
            if name in self._workers.workers:
                self._workers.kill(name)
        for name in self.names:
            self._workers.start("learner", name, self._layout.learner_extra(name, rendezvous))


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
