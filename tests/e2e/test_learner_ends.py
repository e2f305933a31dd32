"""A real run whose learner dies, or cannot learn: progress is kept, and what is wrong is said."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.core.actions import OptimizerRewound
from dora_rl.core.events import LearnerJoined, LearnerLost, StopRequested
from dora_rl.model.directory import HfDirectory
from dora_rl.trainer.checkpoints.masters import whole
from dora_rl.weights.store import DiskWeightStore
from tests.kit.places import MODEL
from tests.kit.tiny_runs import STOPPED, TinyRun, finish, pid_of, tiny_run, wait_until

pytestmark = pytest.mark.full

LR = 1e-6
NUM_STEPS = 10
ROUNDED = {
    "trainer__lr": LR,
    "trainer__compute_dtype": "bfloat16",  # and published so: rounding hides most of a step
    "rollout__dtype": "bfloat16",
    "checkpoint__every_steps": 0,
    "orchestration__num_steps": NUM_STEPS,
}
NOTHING_LEARNED = 4


def masters(run: TinyRun) -> dict[str, torch.Tensor]:
    """The float32 weights that the learner's next life would begin with."""
    weights = DiskWeightStore(run.run_dir / "weights")
    beside = DiskWeightStore(run.run_dir / "learner" / "masters")
    (version,) = beside.versions()
    assert version == max(weights.versions())
    sealed, parts = weights.open(version), beside.open(version)
    return {name: whole(name, sealed.tensor(name), parts) for name in sealed.names()}


def progress(run: TinyRun) -> float:
    """How far the weights have come, in steps of the learning rate: root mean square."""
    found = masters(run)
    start = HfDirectory(MODEL)
    moved = torch.cat([(t - start.tensor(n).float()).reshape(-1) for n, t in found.items()])
    return float(moved.square().mean().sqrt()) / LR


@pytest.mark.kills
def test_progress_in_weight_space_outlives_the_learner(tmp_path: Path) -> None:
    through = tiny_run(tmp_path / "through", **ROUNDED)
    through.train()
    killed = tiny_run(tmp_path / "killed", **ROUNDED)
    process = killed.start()
    for step in (1, 3, 5, 7):
        wait_until(f"step {step}", lambda step=step: step in killed.steps(), process)
        os.kill(pid_of(killed, "learner"), signal.SIGKILL)
    finish(process)
    killed.proven()
    events = [entry.event for entry in killed.entries()]
    lost = [event.reason for event in events if isinstance(event, LearnerLost)]
    assert len(lost) == 4 and all("SIGKILL" in reason for reason in lost)
    joined = [event for event in events if isinstance(event, LearnerJoined)]
    rewound = [a for e in killed.entries() for a in e.actions if isinstance(a, OptimizerRewound)]
    assert [(a.version, a.optimizer_version) for a in rewound] == [
        (event.version, event.optimizer_version) for event in joined[1:]
    ]
    a, b = progress(killed), progress(through)
    print(f"moved by {a:.2f} learning rates with 4 kills, {b:.2f} without: {a / b:.0%}")
    # Only what came after the last kill would be left of it, 2 steps of 10.
    assert a > 0.7 * b


def own_loss(folder: Path, body: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "loss.py"
    # Made-up batches, on which every loss is tried before the start, are of step 3.
    good = "    if inputs.step == 3:\n        return inputs.logprobs_T\n"
    path.write_text(f"def mine(inputs, options):\n{good}    return {body}\n")
    return f"{path}:mine"


def stops(run: TinyRun) -> list[str]:
    found = [entry.event for entry in run.entries()]
    assert not any(isinstance(event, LearnerLost) for event in found), "nobody began again"
    return [event.reason for event in found if isinstance(event, StopRequested)]


def test_a_run_that_skipped_every_update_is_no_success(tmp_path: Path) -> None:
    loss = own_loss(tmp_path, "inputs.logprobs_T * float('nan')")
    settings: dict[str, Any] = {"algorithm__loss": loss, "orchestration__num_steps": 2}
    run = tiny_run(tmp_path, **settings)
    said = run.train(status=NOTHING_LEARNED)
    assert "2 of 2 updates were skipped: their loss or gradient was not finite" in said
    assert "nothing was learned" in said
    assert (run.summary()["updates_applied"], run.summary()["updates_skipped"]) == (0, 2)
    early = tiny_run(tmp_path / "early", **settings, trainer__skipped_updates_max=1)
    said = early.train(status=STOPPED)
    assert "stopped: learner: 1 updates in a row were skipped" in said
    assert len(stops(early)) == 1 and early.steps() == [0]


def test_a_loss_without_a_gradient_stops_the_run_with_its_name(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, algorithm__loss=own_loss(tmp_path, "inputs.logprobs_T.detach()"))
    said = run.train(status=STOPPED)
    assert (
        f"stopped: learner: algorithm.loss '{tmp_path}/loss.py:mine' returns a loss without" in said
    )
    assert len(stops(run)) == 1


def test_rewards_beyond_float32_fail_by_name(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def huge(completions, **kwargs):\n    return [1e39] * len(completions)\n")
    run = tiny_run(tmp_path, reward__functions=[f"{path}:huge"])
    said = run.train(status=STOPPED)
    assert "returned 1e+39, beyond ±1e+18" in said
    assert not any(isinstance(entry.event, LearnerLost) for entry in run.entries())
