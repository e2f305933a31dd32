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
from typing import TYPE_CHECKING, Any

from dora_rl.core import events as ev

if TYPE_CHECKING:
    from dora_rl.worlds.local import LocalRun

RESTARTS_MAX = 20  # of the evaluator, while no step is committed
STARTS_MAX = 3  # of one worker that ends before it is ready
LOST_SCORERS_MAX = 3  # times the attempts of a sample, or the workers if they are more


class Recovery:
    """Counts the ends and acts on each."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._num_restarts = 0
        self._num_starts: Counter[str] = Counter()
        self._has_committed = False
        self._left_out: list[str] = []

    def joined(self, name: str) -> None:
        """A worker has said something: its start went well."""
        self._run.pool.workers[name].joined = True
        self._num_starts.pop(name, None)

    def committed(self) -> None:
        self._num_restarts, self._has_committed = 0, True
        again, self._left_out = self._left_out, []
        for name in again:
            self._run.pool.restart(name)

    def fatal(self, name: str, body: dict[str, Any]) -> None:
        """A worker says why it ends. What is wrong from the start, or everywhere, ends the run."""
        bad_start = not self._run.pool.workers[name].joined and not self._dispensable(name)
        if body["ends_run"] or bad_start:
            self._run.handle(ev.StopRequested(f"{name}: {body['reason']}"))

    def lost(self, name: str) -> None:
        """A process ended that should not have."""
        run = self._run
        if run.pool.closing or (run.stop is not None and not run.stop.done):
            return
        self._num_starts[name] += 1
        self._num_restarts += name == "evaluator"
        if self._num_starts[name] >= STARTS_MAX or self._num_restarts > RESTARTS_MAX:
            self._give_up(name)
        elif name.startswith("reward"):
            self._lose_scorer(name)
        elif name.startswith("env"):
            run.envs.lost(name)
        elif name == "evaluator":
            assert run.evaluations is not None
            run.evaluations.lost(self._why(name))
        elif run.stop is None:
            self._replace(name)

    def _give_up(self, name: str) -> None:
        run, why = self._run, self._why(name)
        if name == "evaluator":
            assert run.evaluations is not None
            run.evaluations.give_up()
            run.on_wait([f"evaluation given up; the evaluator keeps ending: {why}"])
        elif self._num_restarts <= RESTARTS_MAX and self._dispensable(name):
            self._lose_instance(name)
            self._num_starts.pop(name)
            self._left_out.append(name)
            run.on_wait([f"{name} keeps ending and is left out for this step: {why}"])
        else:
            run.handle(ev.StopRequested(f"{name} keeps ending: {why}"))

    def _lose_scorer(self, name: str) -> None:
        """Many ends in a row are not the fault of single samples: nothing would ever be scored."""
        run, why = self._run, self._why(name)
        status = run.pool.workers[name].process.poll()
        how = f" (status {status})" if status and status > 0 else ""
        run.scoring.lost(name)
        num = run.scoring.num_lost_in_a_row
        each = max(run.params.attempts_max, len(run.scoring.names))
        if num >= LOST_SCORERS_MAX * each:
            run.handle(
                ev.StopRequested(
                    f"reward workers ended {num} times with no score in between, the last one, "
                    f"{name}{how}: {why}; mend the reward and resume"
                )
            )

    def _why(self, name: str) -> str:
        """Its own words, or how its process ended with what its log has: never nothing."""
        pool = self._run.pool
        why, tail = pool.why_ended(name), pool.log_tail(name)
        return why if pool.workers[name].last_words or not tail else f"{why}; its log ends: {tail}"

    def _dispensable(self, name: str) -> bool:
        """An instance of a run that works, and others go on working."""
        workers = self._run.pool.workers
        others = [w for w in workers.values() if w.role == "instance" and w.name != name]
        works = any(w.joined and w.process.poll() is None for w in others)
        return workers[name].role == "instance" and self._has_committed and works

    def _replace(self, name: str) -> None:
        run = self._run
        if name.startswith("learner"):
            why = run.pool.why_ended(name)
            life = run.pool.workers["learner"].incarnation
            run.handle(ev.TrainerLost(why, incarnation=life))
            if run.stop is None:
                run.on_wait([f"the {name} ended and begins again at the newest version: {why}"])
                run.start_learner()
        else:
            self._lose_instance(name)
            if run.stop is None:
                run.pool.restart(name)

    def _lose_instance(self, name: str) -> None:
        run = self._run
        run.journals.collect(name, alive=set(run.state.groups))
        life = run.pool.workers[name].incarnation
        run.handle(ev.InstanceLost(name, run.pool.why_ended(name), incarnation=life))
