"""What happens when a worker ends: it is replaced, given up, or the run stops with the reason.

A worker that ends at its start again and again stops the run: it is resumable, and the reason names
the worker and its last words. So do reward workers that end many times with no answer of any of
them in between: a reward that ends its process for one sample costs that sample alone. Not so an
instance once a step was committed, while others work: a host that went bad costs its instance,
which is tried again after every step. Of learners and instances that are lost at work the core
keeps count; it is told their last words.
"""

from __future__ import annotations

from collections import Counter

from dora_rl.controller.env_relay import EnvRelay
from dora_rl.controller.evaluation import Evaluations
from dora_rl.controller.loop import Control
from dora_rl.controller.scoring import ScoringPool
from dora_rl.controller.staff import Ranks
from dora_rl.controller.world import Notify
from dora_rl.core import events as ev
from dora_rl.store.journals import Journals
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
        self.evaluations: Evaluations | None = None
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
                assert self.evaluations is not None
                self.evaluations.lost(self._why(worker))
            case "learner" if stop is None:
                self._replace_learner(worker)
            case _ if stop is None:
                self._lose_instance(worker)
                if self._control.stop is None:
                    self._workers.restart(name)
            case _:
                pass

    def _give_up(self, worker: Worker) -> None:
        name, why = worker.name, self._why(worker)
        if worker.role == "evaluator":
            assert self.evaluations is not None
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
        others = [
            other
            for other in self._workers.workers.values()
            if other.role == "instance" and other is not worker
        ]
        works = any(other.joined and other.process.poll() is None for other in others)
        return worker.role == "instance" and self._has_committed and works

    def _replace_learner(self, worker: Worker) -> None:
        why, first = worker.why_ended(), self._workers.workers["learner"]
        self._control.handle(ev.TrainerLost(why, incarnation=first.incarnation))
        if self._control.stop is None:
            self._notify(f"the {worker.name} ended and begins again at the newest version: {why}")
            self._ranks.start()

    def _lose_instance(self, worker: Worker) -> None:
        self._journals.collect(worker.name, alive=set(self._control.state.groups))
        why, incarnation = worker.why_ended(), worker.incarnation
        self._control.handle(ev.InstanceLost(worker.name, why, incarnation=incarnation))
