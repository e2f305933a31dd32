"""Lives of a learner without a controller: a run directory, and the other end of the channel.

`python -m tests.kit.learner_lives FOLDER KIND=KILLS ...`: lives that are killed with signal 9
wherever they are, and beside them one learner that is never killed; writes what became of both to
FOLDER/result.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections import deque
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from dora_rl.config import RunConfig
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.setup.layout import plan_layout
from dora_rl.setup.settings import learner_algorithm
from dora_rl.trainer.checkpoints import state
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.model import named_weights
from dora_rl.types import RequestId, Trajectory
from dora_rl.weights.store import DiskWeightStore
from dora_rl.workers import messages as msg
from dora_rl.workers.learner import LearnerWorker, read_group
from dora_rl.workers.worker import Setup
from tests.kit.places import MODEL

TWO_GROUPS = {"batch_groups": 2, "num_steps": 1000}
BF16 = {"compute_dtype": "bfloat16", "lr": 1e-6, "canonical_order": True}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"trainer": {**BF16, "schedule": "linear", "num_updates": 400, "warmup_updates": 20}},
    "lora": {"trainer": {**BF16, "lora_rank": 2}},
    "lora merged": {"trainer": {**BF16, "lora_rank": 2, "lora_publish": "merged"}},
    "critic": {"trainer": BF16, "algorithm": {"loss": "ppo", "critic_lr": 1e-6}},
    "two updates": {"trainer": {**BF16, "updates_per_step": 2, "canonical_order": False}},
}
for sections in KINDS.values():
    sections["orchestration"] = TWO_GROUPS


def order(step: int, group: int, groups: int = 1, updates: int = 1) -> msg.Fed:
    """Feed the learner a group of its own; the same one for the same step and number."""
    rng = random.Random(step * 1000 + group)
    lengths = [rng.randint(2, 6) for _ in range(2)]
    total = sum(lengths)
    token_ids = [rng.randrange(3, 15) for _ in range(total)]
    logprobs = [rng.gauss(-3, 0.3) for _ in range(total)]
    samples: list[Trajectory] = []
    for place, length in enumerate(lengths):
        span = slice(sum(lengths[:place]), sum(lengths[:place]) + length)
        payload = (token_ids[span], logprobs[span], [1] * length)
        samples.append(Trajectory(RequestId(group, place), step, *payload, reward=float(place)))
    feed = act.Feed(step, 0, group, step, (0, 1))
    return msg.Fed(feed, groups, updates, np.array([3, 4], dtype=np.int32), tuple(samples))


def ids_of(step: int, groups: int) -> list[int]:
    return [step * groups + i for i in range(groups)]


class Gone:
    """Instead of a message: the controller has died."""


class Controller:
    """The other end of the channel: what it will say, and what it has heard."""

    def __init__(self) -> None:
        self.to_say: deque[msg.Message | Gone] = deque()
        self.committed: list[msg.Committed] = []
        self.said: list[msg.Message] = []
        self.joined: list[ev.LearnerJoined] = []
        self.durable: list[int] = []
        self._num_closed = 0

    def poll(self, timeout_s: float) -> bool:
        if not self._may_speak():
            threading.Event().wait(timeout_s)
        return self._may_speak()

    def _may_speak(self) -> bool:
        """The end comes when every step that was closed is committed."""
        polite = bool(self.to_say) and isinstance(self.to_say[0], (msg.End, Gone))
        return bool(self.to_say) and not (polite and len(self.committed) < self._num_closed)

    def receive(self) -> msg.Message:
        while not self.poll(0.01):
            pass
        if isinstance(self.to_say[0], Gone):
            raise EOFError
        return cast(msg.Message, self.to_say.popleft())

    def send(self, message: msg.Message) -> None:
        match message:
            case msg.Told(ev.LearnerJoined() as event):
                self.joined.append(event)
            case msg.Told(ev.VersionDurable() as event):
                self.durable.append(event.version)
            case msg.Told():
                pass
            case _:
                self.said.append(message)
        if isinstance(message, msg.Committed):
            self.committed.append(message)

    def train(self, step: int, *, closed: bool = True, groups: int = 1, updates: int = 1) -> None:
        """A whole step; without `closed` all but its end."""
        for group in ids_of(step, groups):
            self.to_say.append(order(step, group, groups, updates))
        if closed:
            self._num_closed += 1
            self.to_say.append(msg.Close(act.CloseStep(step, tuple(ids_of(step, groups)))))

    def end(self) -> None:
        self.to_say.append(msg.End())

    def vanish(self) -> None:
        """Dies: the learner has no time to save anything."""
        self.to_say.append(Gone())


class Run:
    """A run directory and the lives of its learner, one at a time."""

    def __init__(self, folder: Path, **sections: dict[str, Any]) -> None:
        self.folder, self.sections = folder, sections
        self._worker: LearnerWorker | None = None

    def config(self, **checkpoint: Any) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": {"path": str(MODEL)},
                "orchestration": {"batch_groups": 1, "num_steps": 1000},
                "rollout": {"num_samples": 2},
                "checkpoint": {"every_steps": 1, "keep": 1, **checkpoint},
                "weights": {"root": str(self.folder / "shared")},
                "runtime": {"device": "cpu", "run_dir": str(self.folder)},
                **self.sections,
            }
        )

    def learner(
        self, controller: Controller | None = None, **checkpoint: Any
    ) -> tuple[LearnerWorker, Any]:
        self.let_go()
        config = self.config(**checkpoint)
        extra = plan_layout(config, "cpu").learner_extra("learner", self.folder / "meeting")
        setup = Setup("learner", "learner", 0, "", "00", str(self.folder), config, extra)
        controller = controller or Controller()
        worker = LearnerWorker(setup, controller.send)
        self._worker = worker
        return worker, controller

    def let_go(self) -> None:
        """The life before has ended: a process waits for its threads, then its lock is free."""
        if self._worker is not None:
            with contextlib.suppress(Exception):
                self._worker.sealing.wait()
            assert self._worker.start.lock is not None
            os.close(self._worker.start.lock)
        self._worker = None

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    """All that the next step depends on, by name."""
    out = {f"policy {n}": p.detach().clone() for n, p in learner.policy.named_parameters()}
    if learner.critic is not None:
        out |= {f"critic {n}": p.detach().clone() for n, p in learner.critic.named_parameters()}
    out |= {f"moments {n}": t.clone() for n, t in state.moments(learner)}
    counters = [learner.next_step, learner.num_updates, learner.optimizer.num_applied]
    out["counters"] = torch.tensor(counters)
    out["random"] = torch.get_rng_state()
    return out


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """The names whose bits are not the same in both."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a or name not in b or not torch.equal(_bits(a[name]), _bits(b[name]))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# -- killed where they are ------------------------------------------------------------------------


class Watched(Controller):
    """Tells the other process how far it is, and goes on for ever."""

    def __init__(self, pipe: int, last: int | None, updates: int) -> None:
        super().__init__()
        self._pipe, self._last, self._updates = pipe, last, updates
        self.step = 0

    def receive(self) -> msg.Message:
        os.write(self._pipe, b".")
        return super().receive()

    def poll(self, timeout_s: float) -> bool:
        if not self.to_say and len(self.committed) == self._num_closed:
            if self._last is not None and self.step >= self._last:
                self.end()
            else:
                self.train(self.step, groups=2, updates=self._updates)
                self.step += 1
        return super().poll(timeout_s)


def live(run: Run, pipe: int, state_every_s: float, last: int | None) -> None:
    """One life, in a process of its own; notes what it began with."""
    updates = run.config().trainer.updates_per_step
    controller = Watched(pipe, last, updates)
    worker, _ = run.learner(controller, every_steps=7, state_every_s=state_every_s)
    controller.step = max(0, worker.version)
    with (run.folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps([worker.version, worker.start.optimizer_version]) + "\n")
    os.write(pipe, b"!")
    worker.run(controller)


def kill_often(run: Run, num_kills: int) -> None:
    """Lives that end by signal 9 after some messages, then one that ends cleanly."""
    rng = random.Random(num_kills)
    for number in range(num_kills + 1):
        clean = number == num_kills
        messages = 10**9 if clean else rng.randint(2, 12)
        # Now and then the moments are written after every step, otherwise with checkpoints alone.
        every_s = rng.choice([0.0, 1e9])
        stored = DiskWeightStore(run.folder / "weights").versions()
        last = max(stored, default=0) + 3 if clean else None
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            try:
                live(run, theirs, every_s, last)
                os._exit(0)
            finally:  # an error, which must not go on in a copy of the other process
                traceback.print_exc()
                os._exit(1)
        os.close(theirs)
        heard = 0
        while heard < messages and (data := os.read(ours, 1)):
            heard += data == b"."
        if not clean:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(ours)
        assert os.waitstatus_to_exitcode(status) == (0 if clean else -signal.SIGKILL), number


def never_killed(run: Run, starts: list[tuple[int, int]], last: int) -> Learner:
    """The same groups, and the moments of the same versions at the same points."""
    config = run.config()
    store = DiskWeightStore(run.folder / "weights of the one that lives")
    learner = Learner(
        config.model.path, learner_algorithm(config), config.trainer, batch_groups=2, store=store
    )
    moments = {0: dict(state.moments(learner))}
    for step in range(last):
        for version, optimizer_version in starts:
            if version == step and optimizer_version < version:
                _set_moments(learner, moments[optimizer_version])
        store.publish(step, named_weights(learner.policy))
        learner.begin_step(step)
        for group in ids_of(step, 2):
            message = order(step, group)
            learner.feed([read_group(message)])
        learner.finish_step()
        moments[step + 1] = {name: t.clone() for name, t in state.moments(learner)}
    return learner


class _Plain:
    """Tensors by name where a sealed version is wanted."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _set_moments(learner: Learner, tensors: dict[str, torch.Tensor]) -> None:
    for optimizer in (learner.optimizer, learner.critic_optimizer):
        if optimizer is not None:
            optimizer.adamw.state.clear()
    state.load_moments(learner, cast(Any, _Plain(tensors)))


def _unmoved(learner: Learner, begun: dict[str, torch.Tensor]) -> list[str]:
    """Trained weights that are what they were at the start."""
    named = learner.policy.named_parameters()
    trained = [(n, p.detach()) for n, p in named if p.requires_grad]
    return [name for name, p in trained if torch.equal(p, begun[f"policy {name}"])]


def main(folder: Path, kinds: dict[str, int]) -> None:
    torch.set_num_threads(1)
    runs = {kind: Run(folder / kind, **KINDS[kind]) for kind in kinds}
    begun = {
        kind: everything(Learner(MODEL, learner_algorithm(run.config()), run.config().trainer))
        for kind, run in runs.items()
    }  # first, so that no life has to import for itself what a learner needs
    for kind, run in runs.items():
        run.folder.mkdir(parents=True)
        kill_often(run, kinds[kind])
    results: dict[str, Any] = {}
    for kind, run in runs.items():
        lines = (run.folder / "starts.jsonl").read_text().splitlines()
        starts = [(v, o) for v, o in map(json.loads, lines)]
        worker, _ = run.learner(every_steps=7)
        killed = everything(worker.learner)
        lived = everything(never_killed(run, starts, worker.version))
        results[kind] = {
            "starts": starts,
            "versions": [worker.version, worker.start.optimizer_version],
            "num_updates": worker.learner.num_updates,
            "updates_per_step": run.config().trainer.updates_per_step,
            "differ": [n for n in differing(killed, lived) if n != "random"],
            "unmoved": _unmoved(worker.learner, begun[kind]),
        }
    (folder / "result.json").write_text(json.dumps(results))


if __name__ == "__main__":
    asked = [word.split("=") for word in sys.argv[2:]]
    # Some virtual machines announce matrix instructions for bfloat16 that they then refuse.
    with torch.backends.mkldnn.flags(enabled=False):
        main(Path(sys.argv[1]), {kind: int(kills) for kind, kills in asked})
