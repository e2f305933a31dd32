"""What workers say, given to whoever it concerns: by the role of the worker, then by the message.

any worker says       controller does                                core hears
Fatal                 stops the run with the reason                  StopRequested
Fault                 remembers the reason for its end               -
(gone)                reads its journal, starts it again             InstanceLost / LearnerLost
the learner says
Told LearnerJoined    writes a step that was sealed before a crash   LearnerJoined
Committed             writes the step's records                      StepCommitted
Told VersionDurable   asks for its evaluation                        VersionDurable
Told Recomputed       tells of a sample that is not its version's    Recomputed
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from dora_rl.controller.evaluation import KeptVersions
from dora_rl.controller.loop import Control
from dora_rl.controller.records import TrainedSample
from dora_rl.controller.recovery import Recovery
from dora_rl.controller.run_dir import RunFiles
from dora_rl.controller.world import Notify, Service, World
from dora_rl.core import events as ev
from dora_rl.core.state import Phase
from dora_rl.data.prompts import PromptSource
from dora_rl.store.trajectories import text_digest
from dora_rl.types import StepIndex, Version
from dora_rl.workers import messages as msg
from dora_rl.workers.pool import Envelope, Worker, Workers

Handler: TypeAlias = Callable[[Worker, msg.Message], None]


class Inbox:
    """`handlers` and `services` are by role; every worker has one of either."""

    def __init__(
        self,
        workers: Workers,
        recovery: Recovery,
        files: RunFiles,
        notify: Notify,
        handlers: Mapping[str, Handler],
        services: Mapping[str, Service],
    ) -> None:
        self._workers, self._recovery, self._files = workers, recovery, files
        self._notify, self._handlers, self._services = notify, handlers, services

    def read_next(self, wait_s: float) -> None:
        """What comes next, if anything does for so long."""
        envelope = self._workers.next_said(wait_s)
        if envelope is not None:
            self.read(envelope)

    def read(self, envelope: Envelope) -> None:
        if not self._workers.is_current(envelope):
            return
        worker, message = self._workers.workers[envelope.name], envelope.message
        service = self._services.get(worker.role)
        if service is not None:
            self._serve(service, worker, message)
            return
        if not isinstance(message, msg.Fault | msg.Fatal | None):
            self._recovery.joined(worker)
        match message:
            case None:
                self._recovery.lost(worker)
            case msg.Fault(reason):
                worker.last_words = reason
            case msg.Fatal(reason):
                worker.last_words = reason
                self._recovery.fatal(worker, message)
            case msg.Note(line):
                self._notify(line)
            case msg.Usage(busy_s, cpu_s, drafted, accepted):
                self._files.records.usage(worker.name, worker.incarnation, busy_s, cpu_s)
                self._files.records.drafts(drafted, accepted)
            case msg.UserRaised():
                self._files.records.totals.num_user_errors += 1
                self._files.user_errors.add(worker.name, message)
            case _:
                self._handlers[worker.role](worker, message)

    def _serve(self, service: Service, worker: Worker, message: msg.Message | None) -> None:
        match message:
            case None:
                service.lost(worker.name)
            case msg.Fatal(reason) | msg.Fault(reason):
                service.fatal(worker, reason)
            case _:
                worker.joined = True
                service.hear(worker, message)


def _left_figures(run_dir: Path, step: StepIndex) -> dict[str, float]:
    """Those of a step whose learner ended right after its seal; none where they are damaged."""
    try:
        left = json.loads((run_dir / "learner.json").read_text())
        figures: dict[str, Any] = left["metrics"] if left["step"] == step else {}
        return {name: value for name, value in figures.items() if isinstance(value, int | float)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


class FromLearner:
    """The handler of the role `learner`."""

    def __init__(
        self,
        control: Control,
        files: RunFiles,
        train: PromptSource,
        world: World,
        recovery: Recovery,
        kept: KeptVersions,
        notify: Notify,
    ) -> None:
        self._control, self._files, self._train, self._world = control, files, train, world
        self._recovery, self._kept, self._notify = recovery, kept, notify

    def hear(self, worker: Worker, message: msg.Message) -> None:
        match message:
            case msg.Told(event):
                self._told(event)
            case msg.Committed():
                self._committed(worker, message)
            case msg.Ready():
                pass  # a rank that has nothing to tell
            case _:
                raise AssertionError(f"a learner does not say {message!r}")

    def _told(self, event: ev.Event) -> None:
        state, is_running = self._control.state, self._control.stop is None
        match event:
            case ev.LearnerJoined(version=version) if version < state.committed:
                self._lost_alive(version)
                return
            case ev.LearnerJoined(version=version):
                self._joined(version)
            case ev.VersionDurable(version=version) if is_running:
                self._kept.ask(version)
            case ev.Recomputed(is_same=False) if is_running:
                self._mismatched(event)
        self._control.handle(event)

    def _committed(self, worker: Worker, message: msg.Committed) -> None:
        usage = message.usage
        self._files.records.usage("learner", worker.incarnation, usage.busy_s, usage.cpu_s)
        if self._control.stop is None:
            digest = self._record(message.event.step, message.metrics)
            self._files.checksums[message.event.step + 1] = message.event.checksum
            self._control.handle(replace(message.event, metrics=digest))

    def _joined(self, version: Version) -> None:
        step = self._control.state.committed
        if version == step + 1:
            # Sealed before a crash, logged only now. The learner left its figures on disk.
            self._record(step, _left_figures(self._files.run_dir, step))
        self._kept.ask(version)  # it is on disk only now

    def _lost_alive(self, version: Version) -> None:
        """Somebody has taken the shared memory, or the disk, away under the run."""
        newest, durable = self._control.state.committed, self._control.state.durable
        text = (
            f"version {newest} is gone from shared memory and was not on disk yet; "
            f"--resume goes back to version {version}"
        )
        if version < durable:
            text = f"version {durable} is gone from {self._files.versions.disk.root}; restore it"
        self._control.handle(ev.StopRequested(text))

    def _mismatched(self, event: ev.Recomputed) -> None:
        """Told at the first, the tenth, the hundredth: where one is wrong, many may be."""
        totals = self._files.records.totals
        totals.samples_mismatched += 1
        if str(totals.samples_mismatched).strip("0") == "1":
            self._notify(
                f"sample {event.request.sample} of group {event.request.group} is not what "
                f"version {event.version} gives: log-probs {event.gap_mean:.2g} apart on "
                f"average, {event.gap_max:.2g} at most ({totals.samples_mismatched} so far)"
            )

    def _record(self, step: StepIndex, metrics: dict[str, float]) -> str:
        """Write what a step trained on, before the log says that it is committed. Returns the
        digest of its line of metrics.jsonl."""
        state, files = self._control.state, self._files
        if step != state.committed:
            return ""
        self._world.step_closed(step)
        trained: list[TrainedSample] = []
        samples = tokens = 0  # of these groups altogether
        for gid in state.batches[step].groups:
            group = state.groups[gid]
            scored = tuple(r.id.sample for r in group.requests if r.phase is Phase.SCORED)
            prompt, whole = self._train.prompt(group.prompt), files.records.has_rollouts
            trained.extend(files.samples.trained(gid, scored, prompt, tokens=whole))
            samples += len(group.requests)
            tokens += files.samples.num_tokens(gid)
        failed = (samples - len(trained), tokens - sum(s.num_tokens for s in trained))
        if state.policy.freshness:
            figures = state.freshness.figures(self._control.now(), state.params.batch_groups)
            metrics = metrics | figures
        line = files.records.step(step, metrics, trained, files.dropped, failed)
        files.dropped.clear()
        self._recovery.committed()
        self._notify.on_step(dict(line))
        if skipped := line.get("update/skipped_non_finite"):
            self._notify(f"step {step}: {skipped:.0f} updates skipped, loss or gradient not finite")
        return text_digest(json.dumps(line))
