"""What workers say, given to whoever it concerns: by the role of the worker, then by the message.

instance says         controller does                       core hears
Told                  mends a version that cannot be read   the event
Finished              row into the table                    SampleFinished
TurnEnded             asks an environment worker            -
Exported              tells the destination to import       -
Imported              tells the source to forget            Moved
any worker says
Fatal                 stops the run with the reason         StopRequested
Fault                 remembers the reason for its end      -
(gone)                reads its journal, starts it again    InstanceLost / TrainerLost
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from dora_rl.controller.env_relay import EnvRelay
from dora_rl.controller.files import RunFiles
from dora_rl.controller.loop import Control
from dora_rl.controller.recovery import Recovery
from dora_rl.controller.world import Carrier, Notify, Service
from dora_rl.core import events as ev
from dora_rl.core.ledger import current
from dora_rl.types import Version
from dora_rl.weights.store import WeightsError
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
        match message:
            case None:
                self._recovery.lost(worker)
                return
            case msg.Fault(reason):
                worker.last_words = reason
                return
            case msg.Fatal(reason):
                worker.last_words = reason
                self._recovery.fatal(worker, message)
                return
            case _:
                self._recovery.joined(worker)
        match message:
            case msg.Note(line):
                self._notify(line)
            case msg.Usage(busy_s, cpu_s):
                self._files.records.usage(worker.name, worker.incarnation, busy_s, cpu_s)
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


class FromInstances:
    """The handler of the role `instance`. Decides nothing: a move that the core has given up in the
    meantime is cleaned away."""

    def __init__(
        self,
        control: Control,
        files: RunFiles,
        workers: Workers,
        carrier: Carrier,
        envs: EnvRelay,
        decode: Callable[[Sequence[int]], str],
        notify: Notify,
    ) -> None:
        self._control, self._files, self._workers = control, files, workers
        self._carrier, self._envs, self._decode = carrier, envs, decode
        self._notify = notify

    def hear(self, worker: Worker, message: msg.Message) -> None:
        match message:
            case msg.Told(event):
                if isinstance(event, ev.LoadFailed):
                    self._repair(event.version)
                self._control.handle(event)
            case msg.Finished():
                self._finished(message)
            case msg.TurnEnded():
                self._envs.turn_ended(worker.name, message)
            case msg.Exported():
                self._exported(worker.name, message)
            case msg.Imported(export):
                self._imported(worker, export)
            case msg.ImportFailed(export, reason):
                self._workers.send(export.src, msg.MoveEnded(export.request, done=False))
                who = (export.request, export.epoch, export.src, worker.name)
                failed = ev.MoveFailed(*who, True, reason, attempt=export.attempt)
                self._control.handle(failed)
            case _:
                raise AssertionError(f"an instance does not say {message!r}")

    def _finished(self, message: msg.Finished) -> None:
        event, control = message.event, self._control
        if not control.is_generating(event.request, event.epoch):
            return
        (sample,) = message.samples
        self._files.records.totals.tokens_generated += sample.num_trained
        text = self._decode(sample.token_ids.tolist())
        version = control.state.groups[event.request.group].version
        self._files.samples.put(replace(sample, version=version, text=text))
        control.handle(event)

    def _repair(self, version: Version) -> None:
        """An instance could not load a version: make sure that the shared copy is good."""
        try:
            if self._files.versions.repair(version):
                self._notify(f"version {version} was damaged in shared memory; restored from disk")
        except WeightsError as error:
            reason = f"version {version} is damaged on disk too: {error}"
            self._control.handle(ev.StopRequested(reason))

    def _exported(self, src: str, export: msg.Exported) -> None:
        request = current(self._control.state, export.request, export.epoch)
        if request is not None and request.dest == export.dst:
            taken = replace(self._carrier.exported(export, src), src=src)
            self._workers.send(export.dst, msg.Import(taken))
        else:
            self._carrier.given_up(export)  # by the core

    def _imported(self, worker: Worker, export: msg.Exported) -> None:
        self._workers.send(export.src, msg.MoveEnded(export.request, done=True))
        if self._control.stop is None:  # what comes after the stop is not in the log either
            totals = self._files.records.totals
            totals.migrations += 1
            totals.kv_bytes_moved += export.num_bytes
        who = (export.request, export.epoch, export.src, worker.name)
        sizes, incarnation = (export.num_bytes, export.num_tokens), worker.incarnation
        self._control.handle(
            ev.Moved(*who, *sizes, attempt=export.attempt, incarnation=incarnation)
        )
