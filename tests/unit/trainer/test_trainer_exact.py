"""With lr 0, a policy meets itself: nothing between it and its twins, reference and critic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact_cases import (
    FORMS,
    LOSSES,
    algorithm_options,
    check_critic,
    check_recipe,
    check_sealed_scores,
    documents_of,
    learner_of,
    position_gaps,
    run_step,
    trainer_options,
    write_sharp_model,
)
from trainer_cases import FAMILIES, write_tiny_model

from dora_rl.trainer.model import load_policy

DTYPES = ("bfloat16", "float32")


@pytest.fixture(scope="session")
def sharp_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sharp_model(tmp_path_factory.mktemp("sharp") / "qwen3")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("old", ["behaviour", "proximal"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_recipe_sees_no_gap(
    model_dir: Path, loss: str, old: str, form: str, dtype: str
) -> None:
    check_recipe(model_dir, loss, old, trainer_options(form, compute_dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["lean", "transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_sees_no_gap(
    tmp_path: Path, family: str, implementation: str, dtype: str
) -> None:
    model = write_tiny_model(tmp_path / "model", family)
    forms = ("whole",) if family == "qwen3_moe" else FORMS
    for form in forms:
        trainer = trainer_options(form, compute_dtype=dtype, implementation=implementation)
        check_recipe(model, "longcat", "behaviour", trainer)
    check_critic(model, trainer_options(compute_dtype=dtype, implementation=implementation))


@pytest.mark.parametrize("implementation", ["lean", "transformers"])
def test_late_positions_see_no_gap(sharp_dir: Path, implementation: str) -> None:
    trainer = trainer_options(
        compute_dtype="bfloat16", pack_tokens=8192, implementation=implementation
    )
    learner, _ = learner_of(sharp_dir, algorithm_options("longcat", "behaviour"), trainer)
    check_sealed_scores(learner, documents_of(3000, 2))


@pytest.mark.parametrize("implementation", ["lean", "transformers"])
def test_buffers_are_never_rounded(model_dir: Path, implementation: str) -> None:
    trainer = trainer_options(compute_dtype="bfloat16", implementation=implementation)
    learner, _ = learner_of(model_dir, algorithm_options("ppo", "behaviour", kl_coef=0.1), trainer)
    exact = dict(load_policy(model_dir, trainer).named_buffers())
    critic, reference = learner.critic, learner.reference
    assert exact and critic is not None and reference is not None
    for model in (learner.policy, reference, critic.body, learner.scorer.make_twin()):
        for name, buffer in model.named_buffers():
            assert buffer.dtype == exact[name].dtype and torch.equal(buffer, exact[name]), name


@pytest.mark.parametrize("attention", ["loop", "sdpa"])
def test_other_packs_and_kernels_gap_no_more_at_late_positions(
    sharp_dir: Path, attention: str
) -> None:
    here = trainer_options(compute_dtype="bfloat16", attention="loop")
    there = trainer_options(compute_dtype="bfloat16", attention=attention, pack_tokens=1 << 20)
    early, late = position_gaps(sharp_dir, here, there)
    assert late <= 1.5 * early + 1e-7, (early, late)


@pytest.mark.parametrize("form", FORMS)
def test_a_trained_policy_meets_its_sealed_version(model_dir: Path, form: str) -> None:
    """Not at the start only: masters and adapters that training has moved."""
    trainer = trainer_options(form, compute_dtype="bfloat16", lr=1e-2, updates_per_step=2)
    learner, store = learner_of(model_dir, algorithm_options("longcat", "behaviour"), trainer)
    assert run_step(learner)["ppo_kl"] > 0.0  # the second update met other weights
    learner.publish(store, 2).result()
    check_sealed_scores(learner, documents_of(90, 3), version=2)
