"""What a learner says when it cannot go on: one line, and whether another one would do better."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.commands.train import nothing_learned
from dora_rl.config import AlgorithmConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from dora_rl.controller.records import Totals
from dora_rl.core import actions as act
from dora_rl.io.proof import RunKey
from dora_rl.setup.layout import plan_layout
from dora_rl.setup.learner_check import check_learner
from dora_rl.trainer.documents import admit
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.meters import Meters
from dora_rl.types import Group, RequestId, Trajectory, UserError
from dora_rl.workers.messages import (
    Channel,
    Close,
    Committed,
    Fatal,
    Fault,
    Message,
    Note,
)
from dora_rl.workers.worker import Setup, serve
from tests.kit.channels import Door
from tests.kit.learner_lives import Run, ids_of, order
from tests.kit.places import MODEL

KEY = bytes(32)


def no_memory(setup: Setup, channel: Channel) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.25 GiB.")


class Served:
    """A worker in a thread of this process, and what it says until it ends."""

    def __init__(self, folder: Path, role: str, **sections: Any) -> None:
        address = folder / "socket"
        door = Door(address, RunKey(KEY))
        config = Run(folder, **sections).config(every_steps=0)
        extra = plan_layout(config, "cpu").learner_extra("learner", folder / "meeting")
        setup = Setup(role, "learner", 0, str(address), KEY.hex(), str(folder), config, extra)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(setup,), daemon=True)
        self._thread.start()
        self.channel = door.channel()

    def _serve(self, setup: Setup) -> None:
        try:
            serve(setup)
        except Exception as error:  # noqa: BLE001 - what ends the process
            self.error = error

    def train(self, step: int) -> None:
        for group in ids_of(step, 1):
            self.channel.send(order(step, group))
        self.channel.send(Close(act.CloseStep(step, tuple(ids_of(step, 1)))))

    def until(self, *kinds: type[Any]) -> list[Any]:
        """What it says, up to the first message of one of these kinds."""
        said = [self.channel.receive()]
        while not isinstance(said[-1], kinds):
            said.append(self.channel.receive())
        return said


def own_loss(folder: Path, body: str) -> dict[str, Any]:
    path = folder / "loss.py"
    path.write_text(f"import torch\n\ndef mine(inputs, options):\n    return {body}\n")
    return {"loss": f"{path}:mine"}


def test_running_out_of_memory_is_told_as_such(tmp_path: Path) -> None:
    worker = Served(tmp_path, f"{__name__}:no_memory")
    fault = worker.until(Fault, Fatal)[-1]
    assert isinstance(fault, Fault)
    assert fault.reason.startswith("out of memory on the GPU: 2.25 GiB more were wanted")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("(inputs.advantages_T * inputs.old_logprobs_T)", "a loss without a gradient"),
        ("inputs.logprobs_T.detach()", "a loss without a gradient"),
        ("inputs.logprobs_T.sum()", "must return one loss per token"),
        ("inputs.nothing", "raised AttributeError"),
    ],
)
def test_a_loss_that_cannot_be_trained_ends_the_run_with_one_line(
    tmp_path: Path, body: str, line: str
) -> None:
    worker = Served(tmp_path, "learner", algorithm=own_loss(tmp_path, body))
    worker.train(0)
    fatal = worker.until(Fault, Fatal)[-1]
    assert isinstance(fatal, Fatal) and fatal.ends_run
    assert line in fatal.reason and "\n" not in fatal.reason


SHORT = (
    "(_ for _ in ()).throw(torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB'))"
)


def test_memory_that_runs_out_once_is_told_once(tmp_path: Path) -> None:
    """Two documents are too much for one pack, each alone is not."""
    body = f"{SHORT} if inputs.num_sequences > 1 else -inputs.logprobs_T"
    worker = Served(tmp_path, "learner", algorithm=own_loss(tmp_path, body))
    said: list[Message] = []
    for step in range(2):
        worker.train(step)
        said += worker.until(Committed, Fatal, Fault)
    notes = [m.line for m in said if isinstance(m, Note)]
    assert len(notes) == 1 and notes[0].startswith("learner: out of memory in a pack of ")
    assert "Tried to allocate 2 GiB" in notes[0]
    metrics = [m.metrics for m in said if isinstance(m, Committed)]
    assert [m.get("memory/retries", 0) for m in metrics] == [1, 0]
    assert [m["train/packs"] for m in metrics] == [2, 2]


def test_memory_that_is_never_enough_ends_the_run(tmp_path: Path) -> None:
    worker = Served(tmp_path, "learner", algorithm=own_loss(tmp_path, SHORT))
    worker.train(0)
    fatal = worker.until(Fault, Fatal)[-1]
    assert isinstance(fatal, Fatal) and fatal.ends_run
    assert fatal.reason.startswith("out of memory: a document of ")
    assert "Tried to allocate 2 GiB" in fatal.reason


def test_updates_that_are_skipped_in_a_row_end_the_run(tmp_path: Path) -> None:
    """The steps are over all the same: a resumed run goes on after them."""
    algorithm = own_loss(tmp_path, "inputs.logprobs_T * float('nan')")
    trainer = {"skipped_updates_max": 3}
    worker = Served(tmp_path, "learner", algorithm=algorithm, trainer=trainer)
    said: list[Message] = []
    for step in range(3):
        worker.train(step)
        said += worker.until(Committed)
    fatal = worker.until(Fatal)[-1]
    assert fatal.ends_run
    assert fatal.reason.startswith(
        "3 updates in a row were skipped (trainer.skipped_updates_max): in step 2 the loss is nan;"
    )
    metrics = [m.metrics for m in said if isinstance(m, Committed)]
    assert [m["update/skipped_non_finite"] for m in metrics] == [1, 1, 1]


def test_skipped_updates_are_counted_in_a_row_only(tmp_path: Path) -> None:
    body = "inputs.logprobs_T * (float('nan') if inputs.num_sequences == 2 else 1.0)"
    algorithm = AlgorithmConfig(**own_loss(tmp_path, body))
    trainer = TrainerConfig(device="cpu", skipped_updates_max=2)
    learner = Learner(MODEL, algorithm, trainer)
    sample = Trajectory(RequestId(0, 0), 0, [5, 6], [-1.0, -1.0], [1, 1], reward=1.0)
    counts: list[int] = []
    for step, num_samples in enumerate([2, 3, 2, 2, 3]):
        learner.begin_step(step)
        learner.feed([Group(0, step, (3,), (sample,) * num_samples)])
        learner.finish_step()
        counts.append(learner.num_skipped)
        assert learner.skipped_too_many() == (step == 3)
    assert counts == [1, 0, 1, 2, 0]


def test_rewards_beyond_float32_are_left_out_by_name() -> None:
    def sample(reward: float) -> Trajectory:
        return Trajectory(RequestId(0, 0), 0, [5, 6], [-1.0, -1.0], [1, 1], reward=reward)

    group = Group(0, 0, (3,), (sample(1e39), sample(-1e39), sample(1e18), sample(0.0)))
    meters = Meters(torch.device("cpu"))
    kept = admit(group, 0, 100, 10, meters)
    assert kept is not None and [s.reward for s in kept.samples] == [1e18, 0.0]
    dropped = {name: n for name, n in meters.read().items() if name.startswith("dropped/")}
    assert dropped == {"dropped/reward_out_of_range": 2}


def test_the_summary_counts_updates_also_those_of_older_runs() -> None:
    step = {
        "step": 0,
        "tokens_trained": 1,
        "time/step": 1.0,
        "num_samples": 1,
        "staleness/mean": 0.0,
        "staleness/max": 0,
        "mixed_version_frac": 0.0,
        "reward/mean": 0.0,
    }
    totals = Totals()
    totals.add(step | {"update/applied": 2.0, "update/skipped_non_finite": 1.0})
    totals.add(step | {"grad_norm": 0.1})  # before updates were counted
    totals.add(step | {"update/skipped_non_finite": 1.0})
    totals.add(step | {"update/without_gradient": 1.0, "grad_norm": 0.0})
    assert (totals.updates_applied, totals.updates_skipped) == (3, 2)
    assert totals.updates_without_gradient == 1


def test_a_run_whose_every_gradient_was_zero_has_learned_nothing() -> None:
    summary = {"updates_applied": 0, "updates_skipped": 0, "updates_without_gradient": 5}
    assert "every gradient was zero" in (nothing_learned(summary) or "")
    assert nothing_learned(summary | {"updates_applied": 1}) is None
    assert "those of the start" in (nothing_learned(summary | {"updates_skipped": 1}) or "")
    empty = {"samples_trained": 8, "tokens_trained": 0}
    assert "no sample had a token of the policy" in (nothing_learned(empty) or "")
    assert nothing_learned(empty | {"tokens_trained": 1}) is None, "it is of an older release"
    assert nothing_learned({}) is None, "no step was trained, or it is not known"


@pytest.mark.parametrize("loss", ["grpo", "rloo", "reinforce", "reinforce++"])
def test_an_advantage_within_a_group_of_one_is_refused(loss: str) -> None:
    config = RunConfig(
        model=ModelConfig(path=str(MODEL)),
        rollout=RolloutConfig(num_samples=1),
        algorithm=AlgorithmConfig(loss=loss),
    )
    if loss == "reinforce++":  # over the whole batch
        check_learner(config)
        return
    with pytest.raises(UserError, match=r"rollout\.num_samples = 1: .* nothing learned; give 2"):
        check_learner(config)
