"""A learner that ends and begins again: masters, counters and schedule exact after any end, moments
at most as old as asked, everything exact after a clean one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.trainer.learner import Learner
from dora_rl.weights.store import WeightsFull
from dora_rl.workers.learner import LearnerWorker
from dora_rl.workers.messages import Note, Saving
from dora_rl.workers.publication import Moments
from tests.kit.learner_lives import BF16, KINDS, Controller, Run, differing, everything
from tests.kit.places import MODEL, ROOT

RARELY = {"every_steps": 0, "state_every_s": 1e9}


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    """Some virtual machines announce matrix instructions for bfloat16 that they then refuse."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    made: list[Run] = []

    def make(name: str, kind: str) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        made.append(Run(folder, **KINDS[kind]))
        return made[-1]

    yield make
    for run in made:
        run.let_go()


def train(run: Run, steps: range, **checkpoint: Any) -> tuple[LearnerWorker, Controller]:
    """A life that trains these steps and ends cleanly."""
    worker, controller = run.learner(**checkpoint)
    for step in steps:
        whole_step(run, controller, step)
    controller.end()
    worker.run(controller)
    return worker, controller


def whole_step(run: Run, controller: Controller, step: int, *, closed: bool = True) -> None:
    updates = run.config().trainer.updates_per_step
    controller.train(step, groups=2, updates=updates, closed=closed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_end_loses_nothing(runs: Any, kind: str) -> None:
    """Ended between steps and in the middle of one; no checkpoint and no copy of the moments was
    due. What comes of it is what a learner that never ended has, in every bit."""
    through, stopped = runs("through", kind), runs("stopped", kind)
    want, told = train(through, range(6), **RARELY)
    train(stopped, range(2), **RARELY)

    worker, controller = stopped.learner(**RARELY)
    assert (worker.version, worker.start.optimizer_version) == (2, 2)
    whole_step(stopped, controller, 2)
    whole_step(stopped, controller, 3, closed=False)
    worker.run(EndsAfter(controller, messages=5))  # type: ignore[arg-type]
    assert worker.version == 3 and worker.learner.step == 3, "in the middle of step 3"
    assert controller.said[-1] == Saving()

    got, _ = train(stopped, range(3, 6), **RARELY)
    assert (got.start.version, got.start.optimizer_version) == (3, 3)
    assert differing(everything(got.learner), everything(want.learner)) == []
    assert told.committed[-1].event.checksum == got.disk.checksum(6)


class EndsAfter:
    """A channel on which the end comes after so many messages, and one at a time."""

    def __init__(self, inner: Controller, messages: int) -> None:
        self._inner, self._left = inner, messages
        self.send = inner.send

    def poll(self, timeout_s: float) -> bool:
        return timeout_s > 0 and self._inner.poll(timeout_s)

    def receive(self) -> Any:
        if self._left == 0:
            self._inner.to_say.clear()
            self._inner.end()
        self._left -= 1
        return self._inner.receive()


@pytest.mark.parametrize("kind", ["full", "lora merged", "critic"])
def test_weights_and_schedule_are_exact_where_the_moments_are_old(runs: Any, kind: str) -> None:
    """The process dies with no moments on disk: they begin again, nothing else does."""
    run = runs("run", kind)
    worker, controller = run.learner(**RARELY)
    for step in range(3):
        whole_step(run, controller, step)
    controller.vanish()
    with pytest.raises(EOFError):
        worker.run(controller)
    before = everything(worker.learner)
    again, _ = run.learner(**RARELY)
    assert (again.version, again.start.optimizer_version) == (3, 0)
    assert again.learner.num_updates == worker.learner.num_updates == 3
    lost = differing(before, everything(again.learner))
    assert lost and all(name.startswith("moments ") for name in lost)


def test_the_published_weights_alone_would_not_do(runs: Any) -> None:
    """At this learning rate most masters never leave the bfloat16 number they began at."""
    run = runs("run", "full")
    worker, _ = train(run, range(3), **RARELY)
    rounded = Learner(MODEL, AlgorithmConfig(), TrainerConfig(**BF16, device="cpu"))
    start = torch.cat([p.detach().reshape(-1) for p in rounded.policy.parameters()])
    rounded.adopt(worker.disk, 3)
    kept = torch.cat([p.detach().reshape(-1) for p in rounded.policy.parameters()])
    exact = torch.cat([p.detach().reshape(-1) for p in worker.learner.policy.parameters()])
    assert (kept == start.bfloat16().float()).float().mean() > 0.9
    assert (exact != start).float().mean() > 0.5


def test_only_the_newest_version_has_its_masters_and_moments_beside_it(runs: Any) -> None:
    run = runs("run", "full")
    worker, _ = train(run, range(4), every_steps=0, state_every_s=0.0)
    assert worker.start.exact.versions() == [4] and worker.moments.store.versions() == [4]
    assert worker.disk.versions() == [0, 1, 2, 3, 4], "these are the controller's to retire"


def test_masters_of_a_version_that_was_never_sealed_are_not_used(
    runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life wrote the masters of version 2 and died before its weights were sealed."""
    run = runs("run", "full")
    worker, _ = train(run, range(1), **RARELY)
    before = everything(worker.learner)
    worker, controller = run.learner(**RARELY)
    whole_step(run, controller, 1)
    with monkeypatch.context() as patch, pytest.raises(WeightsFull):
        patch.setattr(worker.start.publication.seals_to.versions, "seal", no_room)
        worker.run(controller)
    masters = worker.start.publication.seals_to.masters
    assert masters.versions() == [1, 2] and worker.disk.versions() == [0, 1]
    again, _ = run.learner(**RARELY)
    assert (
        again.start.exact.versions() == again.start.publication.seals_to.masters.versions() == [1]
    )
    assert differing(before, everything(again.learner)) == []
    got, _ = train(run, range(1, 2), **RARELY)
    assert got.start.exact.versions() == [2]
    assert differing(everything(got.learner), everything(worker.learner)) == []


def no_room(*_: object) -> str:
    raise WeightsFull("no room")


def test_a_version_of_an_older_release_is_taken_as_published_and_told(runs: Any) -> None:
    run = runs("run", "full")
    worker, _ = train(run, range(2), **RARELY)
    worker.start.exact.retire(2)
    worker.moments.store.retire(2)
    again, controller = run.learner(**RARELY)
    controller.end()
    again.run(controller)
    assert controller.joined[-1].version == 2 and controller.joined[-1].optimizer_version == 0
    assert (
        any(isinstance(m, Note) for m in controller.said)
        and "has no masters beside it" in again.start.notes[0]
    )


def test_damaged_moments_are_told_and_older_ones_taken(runs: Any) -> None:
    run = runs("run", "full")
    train(run, range(2), every_steps=2, keep=1)
    worker, _ = train(run, range(2, 4), every_steps=50)
    (path,) = (run.folder / "learner" / "moments" / "00000004").glob("*.safetensors")
    damage(path)
    again, _ = run.learner(every_steps=50)
    assert (again.version, again.start.optimizer_version) == (4, 2)
    assert "moments cannot be used" in again.start.notes[0]
    assert worker.learner.num_updates == again.learner.num_updates


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    os.chmod(path, 0o644)
    path.write_bytes(data)


# -- how old the moments may be -------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_moments_are_never_older_than_asked(tmp_path: Path) -> None:
    """Steps of 7 s and moments every 20: the age at any point of the run stays within 20 s."""
    learner = Learner(MODEL, AlgorithmConfig(), TrainerConfig(device="cpu"))
    clock = Clock()
    moments = Moments(tmp_path, 20.0, clock=clock)
    written_s = 0.0
    for version in range(1, 20):
        clock.now_s += 7.0
        assert clock.now_s - written_s <= 20.0
        moments.step_ended(learner, version, done(), saved=version == 9)
        moments.wait()
        if version in moments.store.versions() or version == 9:
            written_s = clock.now_s
    assert len(moments.store.versions()) == 1, "one set is kept"


def test_moments_wait_for_their_version_and_hold_up_no_step(tmp_path: Path) -> None:
    learner = Learner(MODEL, AlgorithmConfig(), TrainerConfig(device="cpu"))
    moments = Moments(tmp_path, 0.0)
    sealed: Future[str] = Future()
    moments.step_ended(learner, 1, sealed, saved=False)
    moments.step_ended(learner, 2, sealed, saved=False)  # the first are not on disk yet
    assert moments.is_writing() and moments.store.versions() == []
    sealed.set_result("")
    moments.wait()
    assert moments.store.versions() == [1]
    failed: Future[str] = Future()
    failed.set_exception(OSError("no room"))
    moments.step_ended(learner, 3, failed, saved=False)
    with pytest.raises(OSError, match="no room"):
        moments.wait()
    assert moments.store.versions() == [1]


def done() -> Future[str]:
    future: Future[str] = Future()
    future.set_result("")
    return future


# -- killed ---------------------------------------------------------------------------------------


def kill(folder: Path, **kills: int) -> dict[str, Any]:
    asked = [f"{kind.replace('_', ' ')}={count}" for kind, count in kills.items()]
    command = [sys.executable, "-m", "tests.kit.learner_lives", str(folder), *asked]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, cwd=ROOT)
    return json.loads((folder / "result.json").read_text())


def check_killed(result: dict[str, Any], num_kills: int) -> None:
    starts = result["starts"]
    assert len(starts) == num_kills + 1, "every life came as far as its learner"
    assert any(optimizer < version for version, optimizer in starts), "some moments were older"
    assert result["versions"][0] == result["versions"][1] > num_kills / 2
    assert result["num_updates"] == result["versions"][0] * result["updates_per_step"]
    assert result["differ"] == []
    assert result["unmoved"] == []


def test_killed_twenty_times_the_masters_are_those_of_one_that_lived(tmp_path: Path) -> None:
    """In bfloat16 at 1e-6, by signal 9 wherever it was; against a learner that was never killed
    and got the moments of the same versions at the same points."""
    check_killed(kill(tmp_path, full=20)["full"], 20)


@pytest.mark.full
def test_killed_twenty_times_with_adapters_a_critic_and_several_updates(tmp_path: Path) -> None:
    kills = {"lora": 20, "lora_merged": 20, "critic": 20, "two_updates": 20}
    for result in kill(tmp_path, **kills).values():
        check_killed(result, 20)


def test_moments_make_way_for_versions_and_not_for_ever(runs: Any, tmp_path: Path) -> None:
    """The disk is busy all the time: a quarter of 20 s is waited, and then no more."""
    worker, _ = train(runs("run", "full"), range(1), **RARELY)
    clock, asked = Clock(), list[float]()

    def busy(seconds: float) -> None:
        asked.append(seconds)
        clock.now_s += 2.0

    moments = Moments(tmp_path / "moments", 20.0, clock=clock, make_way=busy)
    clock.now_s = 19.0
    moments.step_ended(worker.learner, 1, done(), saved=False)
    moments.wait()
    assert asked == [5.0, 3.0, 1.0] and moments.store.versions() == [1]
    moments.save(worker.learner, 2)  # a clean end waits for nobody
    assert len(asked) == 3 and moments.store.versions() == [2]
