"""The learner from outside: streams, updates, resume, publication, bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainer_cases import make_groups

from dora_rl.trainer.learner import Learner
from dora_rl.trainer.options import AlgorithmOptions, TrainerOptions
from dora_rl.types import UserError

TRAINER = TrainerOptions(lr=1e-3, device="cpu", pack_tokens=64)


def flat(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in learner.policy.parameters()])


def run_step(learner: Learner, step: int, groups: list, at_once: int = 1) -> dict[str, float]:
    learner.begin_step(step)
    for i in range(0, len(groups), at_once):
        learner.feed(groups[i : i + at_once])
    return learner.finish_step()


def test_resume_continues_the_same_curve(model_dir: Path, tmp_path: Path) -> None:
    first = Learner(model_dir, AlgorithmOptions(), TRAINER, batch_groups=4)
    for step in range(2):
        run_step(first, step, make_groups(step, 4, version=step))
    first.save(tmp_path / "ckpt")
    second = Learner.resume(tmp_path / "ckpt", AlgorithmOptions(), TRAINER, batch_groups=4)
    assert second.next_step == 2
    for step in range(2, 4):
        groups = make_groups(step, 4, version=step)
        a, b = run_step(first, step, groups), run_step(second, step, groups)
        assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"]
    assert torch.equal(flat(first), flat(second))


def test_non_finite_gradient_is_skipped_and_counted(model_dir: Path) -> None:
    learner = Learner(model_dir, AlgorithmOptions(), TRAINER)
    before = flat(learner)
    groups = make_groups(0, 2)
    sample = groups[0].samples[0]
    # A behaviour log-prob this low makes the ratio overflow where the advantage is negative.
    broken = replace(sample, logprobs=[-1e4] * len(sample.token_ids), reward=-50.0)
    groups[0] = replace(groups[0], samples=(broken, *groups[0].samples[1:]))
    metrics = run_step(learner, 0, groups)
    assert metrics["update/skipped_non_finite"] == 1
    assert torch.equal(before, flat(learner))
    metrics = run_step(learner, 1, make_groups(1, 2))
    assert math.isfinite(metrics["loss"]) and not torch.equal(before, flat(learner))


def test_unknown_loss_names_the_nearest(model_dir: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        Learner(model_dir, AlgorithmOptions(loss="grop"), TRAINER)
