"""A run on one machine: controller, instances, learner, rewards and evaluator as processes.

The controller is one thread that empties the pool's inbox, feeds the core and performs its
actions. Workers are processes, not threads: on a CPU each decodes or trains with its own
interpreter (threads would share one lock for the Python half of every step), and a crash of one
never takes the run with it.

    worker says          controller does                       core hears
    turn                 asks an environment worker            -
    finished + arrays    row into the table                    SampleFinished
    exported             tells the destination to import       -
    imported             tells the source to forget            Moved
    committed + metrics  writes the step's records             StepCommitted
    (durable)            asks for its evaluation               VersionDurable
    fatal                stops the run with the reason         StopRequested
    fault                remembers the reason for its end      -
    (gone)               reads its journal, starts it again    InstanceLost / TrainerLost

Invariant: whatever must survive a crash (a sample's row, a step's records) is written before the
log entry that relies on it, and what is written without that entry is recognised on resume.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.controller.env_relay import EnvRelay
from dora_rl.controller.eval_figures import (
    TAIL_FILE,
    Figures,
    TailPrompts,
    best_evaluated,
    has_failed,
)
from dora_rl.controller.evaluation import Evaluations, due
from dora_rl.controller.garbage import Garbage
from dora_rl.controller.lock import RunLock, learner_ended
from dora_rl.controller.loop import Loop
from dora_rl.controller.moving import on_moving
from dora_rl.controller.ports import FleetPort, KeeperPort, LearnerPort, RewardPort, prompt_of
from dora_rl.controller.records import TrainedSample, open_records
from dora_rl.controller.recovery import Recovery
from dora_rl.controller.resume import config_text, write_config
from dora_rl.controller.scoring import ScoringPool
from dora_rl.controller.watchdog import Watchdog
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.ledger import current
from dora_rl.core.state import Phase, State
from dora_rl.core.step import initial
from dora_rl.data.prompts import PromptSource
from dora_rl.io.lines import read_lines
from dora_rl.io.system_errors import system_line
from dora_rl.io.wire import Message, decode_event
from dora_rl.observe.eventlog import FileLog
from dora_rl.observe.gpu_meter import GpuMeter, start_meter
from dora_rl.ports import Ports
from dora_rl.setup.layout import Layout, start_ranks
from dora_rl.setup.mps import Mps
from dora_rl.setup.settings import core_params
from dora_rl.store.journals import Journals
from dora_rl.store.sample_digest import text_digest
from dora_rl.store.samples import Samples
from dora_rl.store.trajectories import from_message
from dora_rl.types import StepIndex, Version
from dora_rl.weights.carrier import Carrier, SameHost
from dora_rl.weights.store import WeightsError
from dora_rl.weights.versions import Versions
from dora_rl.workers.pool import WorkerPool, Envelope
from dora_rl.workers.full_disk import DISK_ERRORS, full_line, is_full
from dora_rl.workers.user_errors import UserErrors

TICK_S = 0.5


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


def refused(run_dir: Path, lock: RunLock, error: BaseException) -> str | None:
    """What the machine refused a run, in one line; None: it was not the machine."""
    if not lock.is_there():
        return gone_line(run_dir)
    return full_line(run_dir, error) if is_full(error) else system_line(error)


def gone_line(run_dir: Path) -> str:
    return (
        f"the run directory {run_dir} was deleted or moved while the run was going on; "
        "it cannot go on there"
    )


class LocalRun:
    """One `dora-rl train` on this machine."""

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        train: PromptSource,
        evaluation: PromptSource | None,
        decode: Callable[[Sequence[int]], str],
        *,
        resume: bool,
    ) -> None:
        self.config, self.layout = config, layout
        self.run_dir = Path(config.runtime.run_dir)
        self.train, self.decode, self.resume = train, decode, resume
        self.lock = RunLock(self.run_dir)
        self.params = core_params(config)
        events = self.run_dir / "events"
        if resume:
            self.log, state = FileLog.resume(events)
        else:
            self.log, state = FileLog.create(events), initial(self.params)
        self.samples = self._open_samples()
        self.log.before_sync = self.samples.sync
        self.versions = Versions(self.run_dir, layout.weights_root)
        # The version to go back to, where the newest was lost with its host.
        self.goes_back_to = self._find_lost(state) if resume else None
        committed = state.committed if resume else None
        if self.goes_back_to is not None:
            committed = self.goes_back_to
        self.lineage = state.lineage + (self.goes_back_to is not None)
        self.records = open_records(
            config, committed, lambda line: self.on_wait([line]), self.log, self.samples.num_written
        )
        self.user_errors = UserErrors(self.run_dir, lambda line: self.on_wait([line]))
        self.journals = Journals(self.run_dir / "journal")
        self.pool, self.carrier = self._hire()
        self.scoring = ScoringPool(
            self.pool, config.reward.num_workers, config.reward.worker_timeout_s, {"base_dir": "."}
        )
        self.envs = EnvRelay(self.pool, config, partial(prompt_of, self))
        self.evaluations = self._evaluations(evaluation)
        self.keeper = KeeperPort(self)
        ports = (FleetPort(self), LearnerPort(self), RewardPort(self), self.keeper)
        self.loop = Loop(state, Ports(MonotonicClock(), *ports, self.log))
        self.watchdog = Watchdog(self.run_dir / "watchdog.jsonl", config.runtime.watchdog_s)
        self.recovery = Recovery(self)
        self.garbage = Garbage()
        self.mps: Mps | None = None
        self.meter: GpuMeter | None = None
        self.stop: act.Stop | None = None
        self.later: deque[ev.Event] = deque()
        self.dropped: Counter[str] = Counter()
        self.on_step: Callable[[dict[str, Any]], None] = lambda line: None
        self.on_wait: Callable[[list[str]], None] = lambda lines: None

    def _open_samples(self) -> Samples:
        return Samples(self.run_dir / "table.log")

    def _hire(self) -> tuple[WorkerPool, Carrier]:
        """Who starts workers and carries messages, and how weights and KV travel."""
        keep, life = (self.lock.fd,), self.journals.next_life()
        return WorkerPool(self.config, self.run_dir, first_incarnation=life, keep_fds=keep), SameHost()

    @property
    def state(self) -> State:
        return self.loop.state

    def _evaluations(self, source: PromptSource | None) -> Evaluations | None:
        if source is None:
            return None
        e = self.config.evaluation
        prompts = list(source.once(e.num_prompts))[: e.num_prompts]
        has_functions = bool(self.config.reward.functions)
        extra = self.layout.evaluator_extra() | {"has_functions": has_functions}
        tail = TailPrompts(prompts, self.run_dir / TAIL_FILE)
        return Evaluations(
            self.pool, self.scoring, prompts, e, tail, self.decode, self._evaluated, extra
        )

    def _evaluated(self, version: Version, figures: Figures) -> None:
        self.records.evaluation(version, figures)
        score = figures.get(self.config.checkpoint.best_metric.removeprefix("eval/"))
        if score is not None and version:
            self.pool.send("learner", "rate", {"step": version - 1, "score": score})
        self.on_step({"version": version, **{f"eval/{k}": v for k, v in figures.items()}})
        self.retire_unpinned()

    # -- the loop ---------------------------------------------------------------------------------

    def run(self, interrupted: Callable[[], bool]) -> act.Stop:
        """Until the core says stop and the last evaluation is in. A full disk, no memory and a run
        directory that is gone stop it too."""
        try:
            self._start()
            return self._run(interrupted)
        except (*DISK_ERRORS, MemoryError) as error:
            line = refused(self.run_dir, self.lock, error)
            if line is None:
                raise  # a mistake of ours
            self.stop = act.Stop(line, done=False)
            return self.stop

    def _start(self) -> None:
        self.mps = Mps() if self.config.runtime.mps and self.layout.device != "cpu" else None
        self.meter = start_meter(self.layout.device)
        if freed := self.versions.hold() >> 20:
            self.on_wait([f"{freed} MiB of shared memory given back that killed runs had left"])
        shutil.rmtree(self.layout.transfer_root, ignore_errors=True)
        self.layout.transfer_root.mkdir(parents=True)
        if self.resume:
            self.samples.keep_only(self.state.groups.keys())
            self.journals.collect(alive=set(self.state.groups))
            self.versions.keep_only(self.state, {*self._evaluations_missing(), *self._best()})
            self.handle(ev.Resumed(self.params, config=text_digest(config_text(self.config))))
            self._go_back()
            for version in self._evaluations_missing():
                self._ask_evaluation(version)
        else:
            self.versions.clear()
            self.handle(ev.Started(self.params, config=text_digest(config_text(self.config))))
        write_config(self.config, self.run_dir)  # the core has not refused it
        if self.stop is None:
            self.start_learner()
            for name in self.layout.instances:
                self.pool.start("instance", name, self.layout.instance_extra(name))
            self.envs.start()
        if not self._settled() or self.stop is None:
            if self.config.reward.functions:
                self.scoring.start()
            if self.evaluations is not None:
                self.evaluations.start()

    def _find_lost(self, state: State) -> Version | None:
        """A learner that was given up and still writes is waited for."""
        if state.durable == state.committed:
            return None
        with learner_ended(self.run_dir):
            return self.versions.lost(state)

    def _go_back(self) -> None:
        if self.goes_back_to is None or self.stop is not None:
            return
        lost, version = self.state.committed, self.goes_back_to
        self.versions.rewind(version)
        self.handle(ev.Rewound(version))
        self.on_wait(
            [
                f"version {lost} was lost with the host's shared memory before it was on disk: the "
                f"run goes back to version {version} and trains step {version} again"
            ]
        )

    def start_learner(self) -> None:
        start_ranks(self.pool, self.layout, self.run_dir)

    def _run(self, interrupted: Callable[[], bool]) -> act.Stop:
        ticked = 0.0
        while self.stop is None or not self._settled():
            if interrupted():
                return self._interrupt()
            with contextlib.suppress(queue.Empty):
                self.read(self.pool.inbox.get(timeout=TICK_S))
            now = time.monotonic()
            if now - ticked >= TICK_S:
                ticked = now
                self._tick()
        assert self.stop is not None
        return self.stop

    def _interrupt(self) -> act.Stop:
        if self.stop is None:
            self.handle(ev.StopRequested("interrupted"))
        else:
            self.stop = act.Stop("interrupted before the last evaluation", done=False)
        assert self.stop is not None
        return self.stop

    def _tick(self) -> None:
        if not self.lock.is_there():
            self.stop = act.Stop(gone_line(self.run_dir), done=False)
            return
        self.handle(ev.Tick())
        self.records.tick(is_training=self.stop is None)
        self.garbage.tick()
        self.carrier.tick()
        self.scoring.check_time()
        self.envs.check_time()
        if self.evaluations is not None:
            self.evaluations.check_time(self.config.orchestration.report_timeout_s)
        for name in self.pool.overdue(self.config.orchestration.load_timeout_s):
            self.pool.kill(name)  # its end comes through the inbox, like any other
        answered = self.scoring.num_answered + self.envs.num_answered
        lines = self.watchdog.look(self.state, answered) if self.stop is None else []
        if lines:
            self.on_wait(lines + self.envs.waits())

    def _settled(self) -> bool:
        done = self.stop is not None and self.stop.done
        return not done or self.evaluations is None or self.evaluations.idle

    def handle(self, event: ev.Event) -> None:
        if self.stop is None:
            self.loop.handle(event)
        while self.later and self.stop is None:
            self.loop.handle(self.later.popleft())

    def close(self) -> dict[str, Any]:
        """End the workers and write the summary. What the disk has no room for is left out."""
        if self.stop is None or not self.stop.done:
            self.records.cut_short()
        self.pool.end(self.config.runtime.grace_s)
        reason = self.stop.reason if self.stop is not None else "cut off"
        mode, best = self.params.mode.value, self.config.checkpoint
        cores = self.layout.num_cores if self.config.runtime.kind == "local" else 0
        summary: dict[str, Any] = {}
        idle = self._end_device()
        try:
            self.user_errors.close()
            aside = self.state.set_aside
            summary = self.records.summary(
                mode, self.state.committed, reason, cores, idle, best, aside
            )
            self.records.close()
            self.samples.close()
            self.log.close()
        except DISK_ERRORS as error:
            if not is_full(error) and self.lock.is_there():
                raise
        shutil.rmtree(self.layout.transfer_root, ignore_errors=True)
        self.versions.release()
        self.lock.release()
        self.garbage.end()
        return summary

    def _end_device(self) -> float | None:
        """The GPU's idle ratio in the training time, where the run used one."""
        if self.mps is not None:
            self.mps.end()
        if self.meter is None:
            return None
        self.meter.end()
        begin = self.records.training_began
        return self.meter.idle_ratio(begin, self.records.step_began) if begin else None

    # -- what workers say -------------------------------------------------------------------------

    def read(self, envelope: Envelope) -> None:
        if not self.pool.current(envelope):
            return
        if envelope.message is None:
            self.recovery.lost(envelope.name)
            return
        message, name = envelope.message, envelope.name
        if message.kind in ("fatal", "fault"):
            self.pool.workers[name].last_words = message.body["reason"]
            if message.kind == "fatal":
                self.recovery.fatal(name, message.body)
            return
        self.recovery.joined(name)
        match message.kind:
            case "event":
                self._event(decode_event(message.body))
            case "finished":
                self._finished(message)
            case "committed":
                self._committed(envelope.incarnation, message)
            case "usage":
                body = message.body
                self.records.usage(name, envelope.incarnation, body["busy_s"], body["cpu_s"])
            case "note":
                self.on_wait([message.body["line"]])
            case "exported" | "imported" | "import_failed":
                on_moving(self, name, envelope.incarnation, message)
            case "user_error":
                self.records.totals.num_user_errors += 1
                self.user_errors.add(name, message.body)
            case "scored":
                self.scoring.scored(name, message.body)
            case "ready" if name.startswith("learner"):
                pass  # a rank that has nothing to tell
            case _ if name.startswith("reward"):
                self.scoring.ready(name, message.body["at_once"])
            case _ if name.startswith("env") or message.kind == "turn":
                self.envs.hear(name, message)
            case _:
                assert self.evaluations is not None
                self.evaluations.hear(message.kind, message.body)
                self.retire_unpinned()

    def _event(self, event: ev.Event) -> None:
        if isinstance(event, ev.TrainerJoined):
            if event.version < self.state.committed:
                self._lost_alive(event.version)
                return
            self._trainer_joined(event)
        if isinstance(event, ev.VersionDurable) and self.stop is None:
            self._durable(event.version)
        if isinstance(event, ev.LoadFailed):
            self._repair(event.version)
        if isinstance(event, ev.Recomputed) and not event.is_same and self.stop is None:
            self._mismatched(event)
        self.handle(event)

    def _mismatched(self, event: ev.Recomputed) -> None:
        """Told at the first, the tenth, the hundredth: where one is wrong, many may be."""
        totals = self.records.totals
        totals.samples_mismatched += 1
        if str(totals.samples_mismatched).strip("0") == "1":
            self.on_wait(
                [
                    f"sample {event.request.sample} of group {event.request.group} is not what "
                    f"version {event.version} gives: log-probs {event.gap_mean:.2g} apart on "
                    f"average, {event.gap_max:.2g} at most ({totals.samples_mismatched} so far)"
                ]
            )

    def _trainer_joined(self, event: ev.TrainerJoined) -> None:
        if event.version == self.state.committed + 1:
            # Sealed before a crash, logged only now. The learner left its figures on disk.
            step = self.state.committed
            left = list(read_lines(self.run_dir / "learner.json"))
            metrics = left[0]["metrics"] if left and left[0]["step"] == step else {}
            self._record_step(step, metrics)
        if event.version in self._evaluations_missing(event.version):  # on disk only now
            self._ask_evaluation(event.version)

    def _lost_alive(self, version: Version) -> None:
        """Somebody has taken the shared memory, or the disk, away under the run."""
        newest, durable = self.state.committed, self.state.durable
        text = f"version {newest} is gone from shared memory and was not on disk yet; "
        text += f"--resume goes back to version {version}"
        if version < durable:
            text = f"version {durable} is gone from {self.versions.disk.root}; restore it"
        self.handle(ev.StopRequested(text))

    def _durable(self, version: Version) -> None:
        """The evaluator reads versions from the disk."""
        if version in self._evaluations_due(version):
            self._ask_evaluation(version)

    def _repair(self, version: Version) -> None:
        """An instance could not load a version: make sure that the shared copy is good."""
        try:
            if self.versions.repair(version):
                self.on_wait(
                    [f"version {version} was damaged in shared memory; restored from disk"]
                )
        except WeightsError as error:
            self.handle(ev.StopRequested(f"version {version} is damaged on disk too: {error}"))

    def _finished(self, message: Message) -> None:
        event = decode_event(message.body["event"])
        assert isinstance(event, ev.SampleFinished)
        if self.stop is not None or current(self.state, event.request, event.epoch) is None:
            return
        (sample,) = from_message(message.body["samples"], message.arrays)
        self.records.totals.tokens_generated += sample.num_trained
        text = self.decode(sample.token_ids.tolist())
        version = self.state.groups[event.request.group].version
        self.samples.put(replace(sample, version=version, text=text))
        self.handle(event)

    def _committed(self, life: int, message: Message) -> None:
        event, usage = decode_event(message.body["event"]), message.body["usage"]
        assert isinstance(event, ev.StepCommitted)
        self.records.usage("learner", life, usage["busy_s"], usage["cpu_s"])
        if self.stop is None:
            digest = self._record_step(event.step, message.body["metrics"])
            self.handle(replace(event, metrics=digest))

    def _record_step(self, step: StepIndex, metrics: dict[str, float]) -> str:
        """Returns the digest of the step's line of metrics.jsonl."""
        if step != self.state.committed:
            return ""
        trained: list[TrainedSample] = []
        samples = tokens = 0  # of these groups altogether
        for gid in self.state.batches[step].groups:
            group = self.state.groups[gid]
            scored = tuple(r.id.sample for r in group.requests if r.phase is Phase.SCORED)
            prompt = self.train.prompt(group.prompt)
            has_rollouts = self.records.has_rollouts
            trained.extend(self.samples.trained(gid, scored, prompt, tokens=has_rollouts))
            samples += len(group.requests)
            tokens += self.samples.num_tokens(gid)
        failed = (samples - len(trained), tokens - sum(s.num_tokens for s in trained))
        line = self.records.step(step, metrics, trained, self.dropped, failed)
        self.dropped = Counter()
        self.recovery.committed()
        self.on_step(line)
        if skipped := line.get("update/skipped_non_finite"):
            self.on_wait(
                [f"step {step}: {skipped:.0f} updates skipped, loss or gradient not finite"]
            )
        return text_digest(json.dumps(line))

    def step_closed(self, action: act.CloseStep) -> None:
        """The step has all its groups."""

    # -- evaluations and versions -----------------------------------------------------------------

    def _evaluations_due(self, newest: Version) -> list[Version]:
        """Versions up to `newest` that the configuration wants evaluated."""
        every = self.config.evaluation.every_steps
        return due(newest, every, self.params.num_steps) if self.evaluations is not None else []

    def _evaluations_missing(self, newest: Version | None = None) -> list[Version]:
        """Due, not done or failed, and still possible: a crash came between."""
        done, there = self.records.totals.evaluations, self.versions.disk.versions()
        due = self._evaluations_due(self.state.committed if newest is None else newest)
        missing = [version for version in due if version not in done or has_failed(done[version])]
        return [version for version in missing if version in there]

    def _ask_evaluation(self, version: Version) -> None:
        assert self.evaluations is not None
        self.evaluations.ask(version)

    def _best(self) -> set[Version]:
        """The best version that was evaluated, whose weights stay until there is a better one."""
        section = self.config.checkpoint
        done = self.records.totals.evaluations if section.keep_best else {}
        best = best_evaluated(done, section.best_metric, is_max=section.best_is_max)
        return {best[0]} if best is not None else set()

    def retire_unpinned(self) -> None:
        pins = self.evaluations.pins() if self.evaluations is not None else set[Version]()
        self.carrier.retire(self.versions.retire_all_but(pins | self._best()))
