"""The learner as a worker (one per rank): groups in, sealed versions out.

With several ranks every one of them is fed the same groups in the same order; the first one alone
seals, saves and speaks to the controller.

Order at a step's end: trainer state (where a checkpoint is due), a copy of the weights; then,
beside the next step's training (`sealing`), what makes the masters exact and the version itself to
shared memory, the event that becomes the log record, the same to the disk, the event that says so.
With several ranks the learner waits for all of that: the others read versions from the disk. The
optimizer's moments follow now and then, beside it too (`moments`). What it finds at its start is in
`learner_start`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.io.append_log import replace_text
from dora_rl.store.storage import StorageReader
from dora_rl.trainer import distributed
from dora_rl.trainer.warm_up import warm_up
from dora_rl.types import Group, GroupId, StepIndex, Version
from dora_rl.weights.versions import share
from dora_rl.workers import messages as msg
from dora_rl.workers.learner_start import LearnerStart
from dora_rl.workers.recheck import Recheck
from dora_rl.workers.worker import Setup, heartbeat

HEARTBEAT_S = 1.0
POLL_S = 0.05


def serve_learner(setup: Setup, channel: msg.Channel) -> None:
    LearnerWorker(setup, channel.send).run(channel)


class LearnerWorker:
    """One rank of the learner. `executor`: who writes beside the training, in place of threads."""

    def __init__(self, setup: Setup, send: msg.Send, executor: Executor | None = None) -> None:
        config = setup.config
        torch.set_num_threads(max(1, config.trainer.threads or int(setup.extra["threads"])))
        self.setup, self.send = setup, send
        self._in_background = executor is None
        self.start = start = LearnerStart(setup, executor)
        self.rank, self.num_ranks = start.rank, start.num_ranks
        self.learner, self.version = start.learner, start.version
        self.shared, self.disk = start.shared, start.disk
        self.publication, self.sealing = start.publication, start.publication.sealing
        self.checkpoints, self.moments = start.checkpoints, start.moments
        self.reader = StorageReader(setup.run_key)
        device = str(self.learner.device)
        self.recheck = Recheck(self.learner, self.shared, config, device, self._say, self._note)
        self.fed: set[GroupId] = set()
        self.waiting: deque[msg.Message] = deque()
        self.busy_s = 0.0
        self.total_busy_s = 0.0
        self.free_s = self._worked_s()  # since then it could have trained
        self.progress = 0

    def _say(self, event: ev.Event) -> None:
        self.send(msg.Told(event))

    def _note(self, line: str) -> None:
        self.send(msg.Note(f"learner: {line}"))

    def run(self, channel: msg.Channel) -> None:
        """Until the controller says `End`."""
        self.join()
        if self.rank == 0:
            heartbeat(self.report, HEARTBEAT_S)
        if self.num_ranks > 1 or not channel.poll(0.0):  # else the first groups are here already
            self._warm_up()
        try:
            while not isinstance(message := self._receive(channel), msg.End):
                self.hear(message)
        except (EOFError, ConnectionError):
            raise  # nobody is there to hear of it
        except Exception:
            self.sealing.wait()  # a fault in one step does not undo the one before
            raise
        self.close()

    def join(self) -> None:
        """Seal the first version of a new run, and say what there is. Its way to the disk is waited
        for by nobody: where the host is lost before, it is made of the model again."""
        durable: Future[Any] | None = None
        if self.version < 0:
            durable = self._seal(0, {}, lambda checksum: None, lambda: None)
            self.sealing.wait_sealed()
            self.version = 0
        if self.rank:
            self.send(msg.Ready())
            return
        for version in self.disk.versions():
            share(self.disk, self.shared, version)
        for line in self.start.notes:
            self._note(line)
        optimizer = self.start.optimizer_version if self.version else 0
        self._say(
            ev.LearnerJoined(
                self.version,
                optimizer,
                incarnation=self.setup.incarnation,
                durable=self.version,
            )
        )
        if durable is not None:
            durable.add_done_callback(self._say_first_is_durable)

    def _say_first_is_durable(self, durable: Future[Any]) -> None:
        if durable.exception() is None:  # what went wrong is raised by the next look at `sealing`
            self._say(ev.VersionDurable(0, incarnation=self.setup.incarnation))

    def report(self) -> None:
        incarnation = self.setup.incarnation
        self._say(ev.LearnerReport(self.version, self.progress, incarnation=incarnation))

    def close(self) -> None:
        """A clean end keeps the moments of the last version, unless they are on disk already. A
        learner that sealed nothing still has those that it found there."""
        self.sealing.wait()
        known = self.version in self.moments.store.versions() or any(
            saved.step + 1 == self.version for saved in self.checkpoints.saved()
        )
        if distributed.decide(self.version > max(0, self.start.version) and not known):
            if self.rank == 0:
                self.send(msg.Saving())
            self.moments.save(self.learner, self.version)
        self.moments.wait()
        self.publication.close()
        if self.rank == 0:
            self.checkpoints.prune(sealed=self.version)

    def _warm_up(self) -> None:
        """While the first groups are generated."""
        config = self.setup.config
        prompt = config.data.prompt_tokens_max or self.learner.pack_tokens  # 0: any length
        document = prompt + config.rollout.tokens_max
        samples = config.orchestration.batch_groups * config.rollout.num_samples
        warm_up(self.learner, samples * document)
        self._tell_notes()

    def _receive(self, channel: msg.Channel) -> msg.Message:
        """The next message. While there is none, training goes on with what there is. What went
        wrong with the sealing of a version is raised here."""
        self.sealing.is_running()
        self.moments.is_writing()
        self._look_ahead(channel)
        while not self.waiting and self.has_own_work():
            if channel.poll(POLL_S):
                break
            self.go_on()
        if not self.waiting:
            self.waiting.append(channel.receive())
        return self.waiting.popleft()

    def has_own_work(self) -> bool:
        """What goes on without a message."""
        beside = self.sealing.is_running() or self.recheck.is_waiting
        return beside or self.learner.may_go_on()

    def go_on(self) -> None:
        if self.learner.may_go_on():
            with self._at_work():
                self.learner.go_on()
        else:
            self.recheck.go_on()

    def _look_ahead(self, channel: msg.Channel) -> None:
        """The end is heard at once: what was fed and not trained is fed again on resume. Several
        ranks keep to the order, or they would wait for each other."""
        while self.num_ranks == 1 and channel.poll(0.0):
            message = channel.receive()
            if isinstance(message, msg.End):
                self.waiting = deque([message])
                return
            self.waiting.append(message)

    def _tell_notes(self) -> None:
        """What the learner has to say to whoever watches, once."""
        notes, self.learner.notes = self.learner.notes, []
        for line in notes if self.rank == 0 else ():
            self._note(line)

    def hear(self, message: msg.Message) -> None:
        match message:
            case msg.Fed():
                self._feed(message)
            case msg.Close(action):
                self._close(action)
            case msg.Rate(step, score):
                self.checkpoints.rate(step, score)
            case _:
                raise AssertionError(f"a learner does not hear {message!r}")

    def _plan_updates(self, message: msg.Fed) -> None:
        """A batch keeps the B it was filled under, even where a resumed run has another."""
        updates = self.learner.options.updates_per_step
        same = message.updates == updates
        self.learner.groups_per_update = message.batch_groups // updates if same else None

    def _begin(self, step: StepIndex) -> bool:
        """True if this step is the one to train; messages of a finished one are ignored."""
        if step != self.version:
            return False
        if self.learner.step is None:
            self.learner.begin_step(step)
            self.fed = set()
            self.busy_s = 0.0
        return True

    def _feed(self, message: msg.Fed) -> None:
        action = message.action
        if not self._begin(action.step) or action.group in self.fed:
            return
        with self._at_work():
            self._plan_updates(message)
            self.fed.add(action.group)
            group = read_group(message, self.reader)
            self.learner.feed([group])
            self.progress += 1
        self.recheck.offer(group)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        began = self._worked_s()
        yield
        self.busy_s += self._worked_s() - began
        self._tell_notes()

    def _worked_s(self) -> float:
        """A clock that stands while the learner waits for a version that it is still sealing."""
        return time.monotonic() - self.shared.waited_s

    def _close(self, action: act.CloseStep) -> None:
        if not self._begin(action.step):
            return
        incarnation = self.setup.incarnation
        assert set(action.groups) == self.fed, "the batch closed with other groups than were fed"
        if self.rank == 0:
            self._say(ev.BatchAccepted(action.step, incarnation=incarnation))
        with self._at_work():
            metrics = self.learner.finish_step()
        trained_s = time.monotonic()
        waited_s = max(0.0, self._worked_s() - self.free_s - self.busy_s)
        if self.rank == 0:
            self.checkpoints.prune(sealed=action.step)
        last = action.step + 1 == self.setup.config.orchestration.num_steps
        if last:
            self.recheck.finish()  # the log ends with this step
        saved = self.checkpoints.due(action.step, last=last)
        if saved:
            options = self.checkpoints.options
            self.learner.save(self.checkpoints.path_of(action.step), options)
        elif self.rank == 0:
            self.checkpoints.forget(action.step)
        self.total_busy_s += self.busy_s
        metrics["time/train"] = self.busy_s
        metrics["time/wait_for_batch"] = waited_s
        if self.rank == 0:
            self._leave_metrics(action.step, metrics)
        busy_s = self.total_busy_s

        def tell(checksum: str) -> None:
            metrics["time/weight_sync"] = time.monotonic() - trained_s
            # It was this one's turn: the one before is durable.
            said = ev.StepCommitted(
                action.step,
                checksum,
                incarnation=incarnation,
                durable=action.step,
                waited_s=waited_s,
            )
            usage = msg.Usage(busy_s, time.process_time())
            self.send(msg.Committed(said, dict(metrics), usage))

        def tell_durable() -> None:
            self._say(ev.VersionDurable(action.step + 1, incarnation=incarnation))

        durable = self._seal(action.step + 1, metrics, tell, tell_durable)
        self.recheck.catch_up()
        self.progress += 1
        self.version = action.step + 1
        self.moments.step_ended(self.learner, self.version, durable, saved=saved)
        self.free_s = self._worked_s()
        if self.learner.skipped_too_many():
            self.sealing.wait()  # the step is over all the same, and is not trained again
            self.learner.raise_skipped()

    def _leave_metrics(self, step: StepIndex, metrics: dict[str, float]) -> None:
        """For the controller, in case that a crash comes between the seal and its log record."""
        text = json.dumps({"step": step, "metrics": metrics}) + "\n"
        replace_text(Path(self.setup.run_dir) / "learner.json", text)

    def _seal(
        self,
        version: Version,
        metrics: dict[str, float],
        tell: Callable[[str], None],
        tell_durable: Callable[[], None],
    ) -> Future[Any]:
        """All ranks gather; the first one writes. With several, the others wait for that. The
        result comes when the disk has the version."""
        began = time.monotonic()
        self.sealing.is_running()  # raises what went wrong with the one before
        alone, turn = self.num_ranks == 1, self.sealing.turn()
        level, background = self.publication.seals_to, alone and self._in_background
        sealed = self.learner.publish(
            level.versions, version, background=background, exact=level.masters, turn=turn
        )
        metrics["time/publish_stall"] = time.monotonic() - began

        def tell_with_wait(checksum: str) -> None:
            metrics["time/durable_wait"] = self.sealing.waited_s
            tell(checksum)

        durable: Future[Any] = sealed
        if self.rank == 0:
            durable = self.sealing.begin(version, sealed, tell_with_wait, tell_durable)
        if not alone:
            self.sealing.wait()
            distributed.wait_for_all()
        return durable


def read_group(message: msg.Fed, reader: StorageReader | None = None) -> Group:
    """The group of a message. On a cluster that says where the samples are, and what they got."""
    action, samples = message.action, message.samples
    if message.where is not None:
        assert reader is not None
        stored = zip(reader.rows(message.where), message.rewards, strict=True)
        samples = tuple(replace(sample, reward=reward) for sample, reward in stored)
    return Group(action.group, action.version, message.prompt_ids, samples)
