"""A learner that would wait trains what it has, and reads from its device once an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.trainer.learner import Learner
from tests.kit.trainer_cases import SMOOTH_EPS, changed, flat, make_groups

TRAINER = TrainerConfig(lr=1e-3, device="cpu", eps=SMOOTH_EPS)


def test_what_is_worth_a_pack_is_run_and_the_result_is_the_same(model_dir: Path) -> None:
    groups = make_groups(4, 6)
    tokens = sum(len(g.prompt_ids) + len(s.token_ids) for g in groups for s in g.samples)
    plain, patient = (
        Learner(model_dir, AlgorithmConfig(), changed(TRAINER, pack_tokens=tokens))
        for _ in range(2)
    )
    ran: list[bool] = []
    for learner in (plain, patient):
        learner.begin_step(0)
        for group in groups:
            learner.feed([group])
            if learner is patient:
                ran.append(learner.may_go_on())
                if ran[-1]:
                    learner.go_on()
                    assert not learner.may_go_on()
    assert not ran[0] and 1 <= sum(ran) <= 4, "too early, or never"
    want, got = plain.finish_step(), patient.finish_step()
    assert want["train/packs"] == 1 < got["train/packs"]
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    assert (flat(patient) - flat(plain)).abs().max() < 1e-6
    assert not patient.may_go_on()


@pytest.mark.parametrize("options", [{"canonical_order": True}, {"streaming": False}])
def test_a_learner_that_buffers_its_step_waits(model_dir: Path, options: dict[str, bool]) -> None:
    learner = Learner(
        model_dir, AlgorithmConfig(), TRAINER.model_copy(update={"pack_tokens": 8} | options)
    )
    learner.begin_step(0)
    learner.feed(make_groups(4, 3))
    assert not learner.may_go_on()


class Reads(TorchDispatchMode):
    """Counts numbers taken out of tensors: on a GPU the host waits for each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank", [0, 3])
def test_packs_read_nothing(model_dir: Path, rank: int) -> None:
    """However many there are; and what closes an update fetches all it needs at once."""
    algorithm = AlgorithmConfig(kl_coef=0.1)
    counts = []
    for pack_tokens in (16, 4096):
        trainer = changed(TRAINER, pack_tokens=pack_tokens, lora_rank=rank, attention="loop")
        learner = Learner(model_dir, algorithm, trainer, batch_groups=4)
        learner.begin_step(0)
        with Reads() as seen:
            learner.feed(make_groups(4, 4))
            metrics = learner.finish_step()
        counts.append((metrics["train/packs"], seen.count))
    (many, of_many), (few, of_few) = counts
    assert many > 4 * few and of_many == of_few == 0, counts
