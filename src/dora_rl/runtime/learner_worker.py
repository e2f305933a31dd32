"""The learner as a process (one per rank): groups in, sealed versions out.

With several ranks every one of them is fed the same groups in the same order; the first one alone
seals, saves and speaks to the controller.

Durable order at a step's end: trainer state (where a checkpoint is due), sealed weights on disk,
sealed weights in shared memory, then the event that becomes the log record. A version that is
sealed on disk is never trained again under the same number. The weights are copied first and
sealed beside the next step's training (`sealing`), except with several ranks.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.engine.sealed import check_base
from dora_rl.runtime.lora_base import run_base
from dora_rl.runtime.sealing import Sealing, WaitingStore
from dora_rl.runtime.settings import learner_algorithm
from dora_rl.runtime.storage_client import StorageReader
from dora_rl.runtime.versions import MirroredDisk, share
from dora_rl.runtime.wire import Channel, Message, decode_learner, encode_event
from dora_rl.runtime.worker import Setup, beat
from dora_rl.trainer import distributed
from dora_rl.trainer.batch import GroupBatch, Sample
from dora_rl.trainer.checkpoint import Checkpoints
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.options import CheckpointOptions, from_section
from dora_rl.trainer.warm_up import warm_up
from dora_rl.types import GroupId, Segment, StepIndex, Version

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
        self.lock = wait_for_lock(run_dir / ".learner-lock") if self.rank == 0 else None
        where = str(setup.extra.get("ip", ""))
        distributed.join(setup.extra["meeting"], self.rank, self.num_ranks, where)
        self.shared = WaitingStore(setup.extra["weights_root"])
        self.disk = MirroredDisk(run_dir / "weights", self.shared)
        self.sealing = self.shared.sealing = Sealing(self.disk, self.shared)
        options = from_section(CheckpointOptions, config.checkpoint)
        self.checkpoints = Checkpoints(run_dir / "checkpoints", options)
        self.learner, self.optimizer_version = self._open_learner()
        self.version: Version = max(self.disk.versions(), default=-1)
        hint = "put runtime.run_dir on a file system that all learner ranks share"
        distributed.agree("the newest sealed version to be", self.version, hint)
        self._check_base()
        self.reader = StorageReader(bytes.fromhex(setup.key))
        self.fed: set[GroupId] = set()
        self.busy_s = 0.0
        self.total_busy_s = 0.0
        self.progress = 0

    def _open_learner(self) -> tuple[Learner, Version]:
        config, algorithm = self.setup.config, learner_algorithm(self.setup.config)
        batch = config.orchestration.batch_groups
        store = self.disk if self.rank else self.shared  # another rank may be on another host
        kwargs: dict[str, Any] = {"batch_groups": batch, "store": store}
        sealed = max(self.disk.versions(), default=-1)
        saved = [c for c in self.checkpoints.saved() if c.step + 1 <= sealed]
        if not saved:
            learner = Learner(config.model.path, algorithm, config.trainer, **kwargs)
            if sealed > 0:
                self._take_weights(learner, sealed)
            return learner, 0
        newest = saved[-1]
        learner = Learner.resume(newest.path, algorithm, config.trainer, **kwargs)
        # A checkpoint is pruned one day; what is copied beside later ones comes from the model.
        learner.directory = Path(config.model.path)
        if newest.step + 1 < sealed:
            self._take_weights(learner, sealed)
        return learner, newest.step + 1

    def _check_base(self) -> None:
        """What versions that are adapters belong on: the same on every rank, and as it was."""
        base = self.learner.base = run_base(self.setup.config)
        hint = "model.path must hold the same weights on every host"
        distributed.agree("the weights of model.path to be", int(base[:15] or "0", 16), hint)
        if self.version >= 0:
            check_base(self.disk.map(self.version), base, self.setup.config.model.path)

    def _take_weights(self, learner: Learner, version: Version) -> None:
        """The newest sealed weights, where the optimizer's checkpoint is older."""
        with torch.no_grad():
            learner.adopt(self.disk, version)

    def run(self) -> None:
        if self.version < 0:
            self._seal(0, lambda checksum: None)
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
        if self.rank == 0:
            self.checkpoints.prune(sealed=self.version)

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
        while self.sealing.is_running() or self.learner.may_go_on():
            if self.channel.poll(POLL_S):
                break
            if self.learner.may_go_on():
                with self._at_work():
                    self.learner.go_on()
        return self.channel.receive()

    def _say_joined(self) -> None:
        for version in self.disk.versions():
            share(self.disk, self.shared, version)
        optimizer = self.optimizer_version if self.version else 0
        self.channel.send_event(ev.TrainerJoined(self.version, optimizer))
        beat(self.channel, self._beat, BEAT_S)

    def _tell_notes(self) -> None:
        """What the learner has to say to whoever watches, once."""
        notes, self.learner.notes = self.learner.notes, []
        for line in notes if self.rank == 0 else ():
            self.channel.send("note", {"line": f"learner: {line}"})

    def _beat(self) -> None:
        self.channel.send_event(ev.TrainerReport(self.version, self.progress))

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
            self.learner.feed([read_group(action, self._with_rows(message))])
            self.progress += 1

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        began = self._worked_s()
        yield
        self.busy_s += self._worked_s() - began
        self._tell_notes()

    def _worked_s(self) -> float:
        """A clock that stands while the learner waits for a version that it is still sealing."""
        return time.monotonic() - self.shared.waited_s

    def _with_rows(self, message: Message) -> Message:
        """On a cluster the controller says where the rows are, and they are fetched from there."""
        if "rows" not in message.body:
            return message
        stored = self.reader.rows(message.body["rows"])
        return replace(message, arrays=message.arrays | stored.arrays)

    def _close(self, action: act.CloseStep) -> None:
        if not self._begin(action.step):
            return
        assert set(action.groups) == self.fed, "the batch closed with other groups than were fed"
        if self.rank == 0:
            self.channel.send_event(ev.BatchAccepted(action.step))
        with self._at_work():
            metrics = self.learner.finish_step()
        trained_s = time.monotonic()
        if self.rank == 0:
            self.checkpoints.prune(sealed=action.step)
        last = action.step + 1 == self.setup.config.orchestration.num_steps
        if self.checkpoints.due(action.step, last=last):
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
            event = encode_event(ev.StepCommitted(action.step, checksum))
            self.channel.send("committed", {"event": event, "metrics": metrics, "usage": usage})

        self._seal(action.step + 1, tell)
        self.progress += 1
        self.version = action.step + 1

    def _leave_metrics(self, step: StepIndex, metrics: dict[str, float]) -> None:
        """For the controller, in case that a crash comes between the seal and its log record."""
        path = Path(self.setup.run_dir) / "learner.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"step": step, "metrics": metrics}) + "\n")
        temporary.replace(path)

    def _seal(self, version: Version, tell: Callable[[str], None]) -> None:
        """All ranks gather; the first one writes. With several, the others wait for that."""
        self.sealing.wait()
        alone = self.num_ranks == 1
        checksum = self.learner.publish(self.disk, version, background=alone)
        if self.rank == 0:
            self.sealing.begin(version, checksum, tell)
        if not alone:
            self.sealing.wait()
            distributed.wait_for_all()


def wait_for_lock(path: Path) -> int:
    """Held until this process ends: a learner that was given up and lives on never meets us."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def read_group(action: act.Feed, message: Message) -> GroupBatch:
    """The group's samples from the flat arrays of a message."""
    ids, logprobs, mask = (message.arrays[n] for n in ("token_ids", "logprobs", "loss_mask"))
    ends = np.cumsum(message.body["lengths"])
    samples: list[Sample] = []
    for place, end in enumerate(ends):
        begin = int(end) - message.body["lengths"][place]
        segments = tuple(Segment(*pair) for pair in message.body["segments"][place])
        samples.append(
            Sample(
                token_ids=ids[begin:end].tolist(),
                logprobs=logprobs[begin:end].tolist(),
                loss_mask=mask[begin:end].tolist(),
                reward=message.body["rewards"][place],
                segments=segments,
                truncated=message.body["truncated"][place],
            )
        )
    prompt_ids = message.arrays["prompt_ids"].tolist()
    return GroupBatch(action.group, action.version, prompt_ids, tuple(samples))
