"""The learner as a process (one per rank): groups in, sealed versions out.

With several ranks every one of them is fed the same groups in the same order; the first one alone
seals, saves and speaks to the controller.

Order at a step's end: trainer state (where a checkpoint is due), a copy of the weights; then,
beside the next step's training (`sealing`), what makes the masters exact and the version itself to
shared memory, the event that becomes the log record, the same to the disk, the event that says so.
With several ranks the learner waits for all of that: the others read versions from the disk. The
optimizer's moments follow now and then, beside it too (`moments`).

    learner/masters/   of the newest version: what makes its masters, critic and counters exact
    learner/moments/   of the newest version that they were written for

Invariant: however this process ends, the next one on this host has the masters, the critic, the
counters and the schedule of the newest sealed version, bit for bit; after a clean end the moments
too. On another host it has those of the newest durable one.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dora_rl.controller.lock import LEARNER_LOCK
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.engine.sealed import check_base
from dora_rl.io.wire import Channel, Message, decode_learner, encode_event
from dora_rl.setup.settings import learner_algorithm
from dora_rl.store.storage_client import StorageReader
from dora_rl.store.trajectories import from_message
from dora_rl.trainer import distributed, state
from dora_rl.trainer.checkpoint import Checkpoints, Saved
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.options import CheckpointOptions, from_section
from dora_rl.trainer.warm_up import warm_up
from dora_rl.types import Group, GroupId, StepIndex, Version
from dora_rl.weights.levels import Level, disk_level, finish_sealed, is_one_place, shared_level
from dora_rl.weights.lora_base import run_base
from dora_rl.weights.sealing import Sealing, WaitingStore
from dora_rl.weights.store import WeightsError
from dora_rl.weights.versions import share
from dora_rl.workers.moments import Moments
from dora_rl.workers.recheck import Recheck
from dora_rl.workers.worker import Setup, beat

BEAT_S = 1.0
POLL_S = 0.05


class LearnerWorker:
    """The loop of the learner process."""

    def __init__(self, setup: Setup, channel: Channel) -> None:
        config = setup.config
        torch.set_num_threads(max(1, config.trainer.threads or int(setup.extra["threads"])))
        self.setup, self.channel = setup, channel
        run_dir = Path(setup.run_dir)
        self.rank, self.num_ranks = int(setup.extra["rank"]), int(setup.extra["num_ranks"])
        self.lock = wait_for_lock(run_dir / LEARNER_LOCK) if self.rank == 0 else None
        where = str(setup.extra.get("ip", ""))
        distributed.join(setup.extra["meeting"], self.rank, self.num_ranks, where)
        self.shared = WaitingStore(setup.extra["weights_root"])
        shared, disk = shared_level(setup.extra["weights_root"]), disk_level(run_dir)
        self.disk, self.exact = disk.versions, disk.masters
        self.seals_to: Level = disk if is_one_place(shared, disk) else shared
        self.sealing = self.shared.sealing = Sealing(shared, disk)
        self.notes: list[str] = finish_sealed(shared, disk) if self.rank == 0 else []
        distributed.wait_for_all()  # now the disk has the newest version, for every rank
        options = from_section(CheckpointOptions, config.checkpoint)
        self.checkpoints = Checkpoints(run_dir / "checkpoints", options)
        self.moments = Moments(run_dir / "learner" / "moments", options.state_every_s)
        self.version: Version = max(self.disk.versions(), default=-1)
        self.opened_version = self.version
        self.learner, self.optimizer_version = self._open_learner(self.version)
        hint = "put runtime.run_dir on a file system that all learner ranks share"
        distributed.agree("the newest sealed version to be", self.version, hint)
        self._check_base()
        self.reader = StorageReader(bytes.fromhex(setup.key))
        device = str(self.learner.device)
        self.recheck = Recheck(
            self.learner, self.shared, config, device, channel.send_event, self._note
        )
        self.fed: set[GroupId] = set()
        self.waiting: deque[Message] = deque()
        self.busy_s = 0.0
        self.total_busy_s = 0.0
        self.progress = 0

    def _open_learner(self, sealed: Version) -> tuple[Learner, Version]:
        """The learner at the newest sealed version, and the version its moments are of."""
        config, algorithm = self.setup.config, learner_algorithm(self.setup.config)
        batch = config.orchestration.batch_groups
        store = self.disk if self.rank else self.shared  # another rank may be on another host
        kwargs: dict[str, Any] = {"batch_groups": batch, "store": store}
        if self.rank == 0:
            self._forget_unsealed(sealed)
        saved = [c for c in self.checkpoints.saved() if c.step + 1 <= sealed]
        if sealed in self.exact.versions():
            learner = Learner(config.model.path, algorithm, config.trainer, **kwargs)
            learner.adopt(self.disk, sealed, self.exact)
            return learner, self._find_moments(learner, sealed, saved)
        # A new run, or one whose versions an older release has sealed.
        if not saved:
            learner = Learner(config.model.path, algorithm, config.trainer, **kwargs)
        else:
            learner = Learner.resume(saved[-1].path, algorithm, config.trainer, **kwargs)
            # A checkpoint is pruned one day; what is copied beside later ones is the model's.
            learner.directory = Path(config.model.path)
        optimizer_version = saved[-1].step + 1 if saved else 0
        if max(0, sealed) > optimizer_version:
            learner.adopt(self.disk, sealed)
            self.notes.append(
                f"version {sealed} has no masters beside it: it goes on from the published "
                f"weights, with the learning-rate schedule of version {optimizer_version}"
            )
        return learner, optimizer_version

    def _forget_unsealed(self, sealed: Version) -> None:
        """What a life that ended before it sealed the version left beside it, and what is left of
        a version that was lost with its host."""
        for store in (self.exact, self.seals_to.masters):
            for version in store.versions():
                if version > sealed:
                    store.retire(version)
        self.moments.forget_after(sealed)

    def _find_moments(self, learner: Learner, sealed: Version, saved: list[Saved]) -> Version:
        """The newest that are whole, beside the versions or in a checkpoint; 0: none."""
        checkpoints = {c.step + 1: c.path for c in saved}
        there = {v for v in self.moments.store.versions() if v <= sealed}
        for version in sorted(there | checkpoints.keys(), reverse=True):
            if version in checkpoints:
                state.load_saved_moments(learner, checkpoints[version])
                return version
            try:
                self.moments.load(learner, version)
                return version
            except WeightsError as error:
                self.notes.append(f"the optimizer's moments cannot be used: {error}")
        return 0

    def _check_base(self) -> None:
        """What versions that are adapters belong on: the same on every rank, and as it was."""
        base = self.learner.base = run_base(self.setup.config)
        hint = "model.path must hold the same weights on every host"
        distributed.agree("the weights of model.path to be", int(base[:15] or "0", 16), hint)
        if self.version >= 0:
            check_base(self.disk.map(self.version), base, self.setup.config.model.path)

    def run(self) -> None:
        if self.version < 0:
            self._seal(0, {}, lambda checksum: None, lambda: None)
            self.sealing.wait()
            self.version = 0
        if self.rank == 0:
            self._say_joined()
        else:
            self.channel.send("ready", {})
        self._warm_up()
        try:
            self._serve()
        except (EOFError, ConnectionError):
            raise  # nobody is there to hear of it
        except Exception:
            self.sealing.wait()  # a fault in one step does not undo the one before
            raise
        self.sealing.wait()
        self._keep_moments()
        if self.rank == 0:
            self.checkpoints.prune(sealed=self.version)

    def _keep_moments(self) -> None:
        """A clean end: those of the last version, unless they are on disk already. A learner that
        sealed nothing still has those that it found there."""
        known = self.version in self.moments.store.versions() or any(
            saved.step + 1 == self.version for saved in self.checkpoints.saved()
        )
        if distributed.decide(self.version > max(0, self.opened_version) and not known):
            if self.rank == 0:
                self.channel.send("saving", {})
            self.moments.save(self.learner, self.version)
        self.moments.wait()

    def _warm_up(self) -> None:
        """While the first groups are generated, unless they are here already."""
        if self.learner.num_ranks == 1 and self.channel.poll(0.0):
            return
        config = self.setup.config
        prompt = config.data.prompt_tokens_max or self.learner.pack_tokens  # 0: any length
        document = prompt + config.rollout.tokens_max
        samples = config.orchestration.batch_groups * config.rollout.num_samples
        warm_up(self.learner, samples * document)
        self._tell_notes()

    def _serve(self) -> None:
        while (message := self._receive()).kind != "end":
            if message.kind == "rate":
                self.checkpoints.rate(message.body["step"], message.body["score"])
            else:
                self._handle(message)

    def _receive(self) -> Message:
        """The next message. While there is none, training goes on with what there is. What went
        wrong with the sealing of a version is raised here."""
        self.sealing.is_running()
        self.moments.is_writing()
        self._look_ahead()
        while not self.waiting and self._has_own_work():
            if self.channel.poll(POLL_S):
                break
            if self.learner.may_go_on():
                with self._at_work():
                    self.learner.go_on()
            else:
                self.recheck.go_on()
        if not self.waiting:
            self.waiting.append(self.channel.receive())
        return self.waiting.popleft()

    def _has_own_work(self) -> bool:
        """What goes on without a message."""
        beside = self.sealing.is_running() or self.recheck.is_waiting
        return beside or self.learner.may_go_on()

    def _look_ahead(self) -> None:
        """The end is heard at once: what was fed and not trained is fed again on resume. Several
        ranks keep to the order, or they would wait for each other."""
        while self.num_ranks == 1 and self.channel.poll(0.0):
            message = self.channel.receive()
            if message.kind == "end":
                self.waiting.clear()
            self.waiting.append(message)
            if message.kind == "end":
                return

    def _say_joined(self) -> None:
        for version in self.disk.versions():
            share(self.disk, self.shared, version)
        optimizer = self.optimizer_version if self.version else 0
        for line in self.notes:
            self.channel.send("note", {"line": f"learner: {line}"})
        life = self.setup.incarnation
        self.channel.send_event(
            ev.TrainerJoined(self.version, optimizer, incarnation=life, durable=self.version)
        )
        beat(self.channel, self._beat, BEAT_S)

    def _note(self, line: str) -> None:
        self.channel.send("note", {"line": f"learner: {line}"})

    def _tell_notes(self) -> None:
        """What the learner has to say to whoever watches, once."""
        notes, self.learner.notes = self.learner.notes, []
        for line in notes if self.rank == 0 else ():
            self.channel.send("note", {"line": f"learner: {line}"})

    def _beat(self) -> None:
        life = self.setup.incarnation
        self.channel.send_event(ev.TrainerReport(self.version, self.progress, incarnation=life))

    def _handle(self, message: Message) -> None:
        action = decode_learner(message.body["action"])
        if isinstance(action, act.Feed):
            self._feed(action, message)
        elif isinstance(action, act.CloseStep):
            self._close(action)

    def _plan_updates(self, body: dict[str, Any]) -> None:
        """A batch keeps the B it was filled under, even where a resumed run has another."""
        updates = self.learner.options.updates_per_step
        same = body["updates"] == updates
        self.learner.groups_per_update = body["batch_groups"] // updates if same else None

    def _begin(self, step: StepIndex) -> bool:
        """True if this step is the one to train; messages of a finished one are ignored."""
        if step != self.version:
            return False
        if self.learner.step is None:
            self.learner.begin_step(step)
            self.fed = set()
            self.busy_s = 0.0
        return True

    def _feed(self, action: act.Feed, message: Message) -> None:
        if not self._begin(action.step) or action.group in self.fed:
            return
        with self._at_work():
            self._plan_updates(message.body)
            self.fed.add(action.group)
            group = read_group(action, message, self.reader)
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
        assert set(action.groups) == self.fed, "the batch closed with other groups than were fed"
        if self.rank == 0:
            life = self.setup.incarnation
            self.channel.send_event(ev.BatchAccepted(action.step, incarnation=life))
        with self._at_work():
            metrics = self.learner.finish_step()
        trained_s = time.monotonic()
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
        if self.rank == 0:
            self._leave_metrics(action.step, metrics)
        busy_s = self.total_busy_s

        def tell(checksum: str) -> None:
            metrics["time/weight_sync"] = time.monotonic() - trained_s
            usage = {"busy_s": busy_s, "cpu_s": time.process_time()}
            life = self.setup.incarnation
            # It was this one's turn: the one before is durable.
            said = ev.StepCommitted(action.step, checksum, incarnation=life, durable=action.step)
            body = {"event": encode_event(said), "metrics": metrics, "usage": usage}
            self.channel.send("committed", body)

        def tell_durable() -> None:
            life = self.setup.incarnation
            self.channel.send_event(ev.VersionDurable(action.step + 1, incarnation=life))

        durable = self._seal(action.step + 1, metrics, tell, tell_durable)
        self.recheck.catch_up()
        self.progress += 1
        self.version = action.step + 1
        self.moments.step_ended(self.learner, self.version, durable, saved=saved)
        if self.learner.skipped_too_many():
            self.sealing.wait()  # the step is over all the same, and is not trained again
            self.learner.raise_skipped()

    def _leave_metrics(self, step: StepIndex, metrics: dict[str, float]) -> None:
        """For the controller, in case that a crash comes between the seal and its log record."""
        path = Path(self.setup.run_dir) / "learner.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"step": step, "metrics": metrics}) + "\n")
        temporary.replace(path)

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
        level = self.seals_to
        sealed = self.learner.publish(
            level.versions, version, background=alone, exact=level.masters, turn=turn
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


def wait_for_lock(path: Path) -> int:
    """Held until this process ends: a learner that was given up and lives on never meets us."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def read_group(action: act.Feed, message: Message, reader: StorageReader | None = None) -> Group:
    """The group of a message. On a cluster that says where the samples are, and what they got."""
    body, arrays = message.body, message.arrays
    if "rows" in body:
        assert reader is not None
        stored = zip(reader.rows(body["rows"]), body["rewards"], strict=True)
        samples = [replace(sample, reward=reward) for sample, reward in stored]
    else:
        samples = from_message(body["samples"], arrays)
    return Group(action.group, action.version, arrays["prompt_ids"], tuple(samples))
