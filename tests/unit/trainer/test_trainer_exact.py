"""With lr 0, a policy meets itself: nothing between it and its twins, reference and critic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.model import load_policy
from dora_rl.trainer.scoring import score
from tests.kit.exact_cases import (
    FORMS,
    LONG,
    LOSSES,
    algorithm_options,
    by_the_engine,
    check_critic,
    check_recipe,
    check_sealed_scores,
    documents_of,
    early_and_late,
    learner_of,
    other_arithmetic,
    run_step,
    trainer_options,
    write_exact_model,
)
from tests.kit.trainer_cases import FAMILIES
from tests.kit.trainer_store import MemoryStore

OtherScores = Callable[[Path, Learner, MemoryStore], list[torch.Tensor]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exact_model(tmp_path_factory.mktemp("exact") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def sharp_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exact_model(tmp_path_factory.mktemp("sharp") / "qwen3", "qwen3", 2.5, **LONG)


@pytest.mark.parametrize(
    ("form", "dtype"), [*((form, "bfloat16") for form in FORMS), ("whole", "float32")]
)
@pytest.mark.parametrize("old", ["behaviour", "proximal"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_recipe_sees_no_gap(
    model_dir: Path, loss: str, old: str, form: str, dtype: str
) -> None:
    check_recipe(model_dir, loss, old, trainer_options(form, compute_dtype=dtype))


WAYS = [(how, dtype) for how in ("lean", "transformers") for dtype in ("bfloat16", "float32")]


def is_full(family: str, implementation: str, dtype: str) -> bool:
    """What only the long tests have: the slowest way, and most ways of families that share their
    parts with others."""
    way = (implementation, dtype)
    if family.startswith(("llama", "qwen")):
        return way == WAYS[-1]
    return family not in ("gemma3", "phi3") or way != WAYS[0]


@pytest.mark.parametrize(
    ("family", "implementation", "dtype"),
    [
        pytest.param(family, *way, marks=[pytest.mark.full] if is_full(family, *way) else [])
        for family in FAMILIES
        for way in WAYS
    ],
)
def test_every_family_sees_no_gap(
    tmp_path: Path, family: str, implementation: str, dtype: str
) -> None:
    model = write_exact_model(tmp_path / "model", family)
    same: dict[str, Any] = {"compute_dtype": dtype, "implementation": implementation}
    few = implementation == "transformers" and family not in ("qwen2", "llama3_rope")
    for form in ("whole",) if few else FORMS:
        check_recipe(model, "longcat", "behaviour", trainer_options(form, **same))
    check_critic(model, trainer_options(**same))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_compiled_layers_see_no_gap(model_dir: Path, form: str, dtype: str) -> None:
    """What is fused must round where the plain formulas do, with and without gradients."""
    trainer = trainer_options(form, compute_dtype=dtype, compile="on")
    check_recipe(model_dir, "longcat", "behaviour", trainer)


@pytest.mark.parametrize("implementation", ["lean", "transformers"])
def test_late_positions_see_no_gap(sharp_dir: Path, implementation: str) -> None:
    trainer = trainer_options(
        compute_dtype="bfloat16", pack_tokens=8192, implementation=implementation
    )
    learner, _ = learner_of(sharp_dir, algorithm_options("longcat", "behaviour"), trainer)
    check_sealed_scores(learner, documents_of(3000, 1))


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


@pytest.mark.parametrize(
    "others", [other_arithmetic, pytest.param(by_the_engine, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_other_kernels_differ_no_more_at_late_positions(
    tmp_path: Path, family: str, others: OtherScores
) -> None:
    model = write_exact_model(tmp_path / "model", family, **LONG)
    trainer = trainer_options(compute_dtype="bfloat16", pack_tokens=4096)
    learner, store = learner_of(model, algorithm_options("longcat", "behaviour"), trainer)
    ours = learner.scorer.score(documents_of(3025, 4), [0] * 4)
    early, late = early_and_late(ours, others(model, learner, store))
    assert 0.0 < late <= 1.5 * early, (early, late)


@pytest.mark.parametrize("attention", ["loop", pytest.param("sdpa", marks=pytest.mark.full)])
def test_other_packs_differ_by_rounding_alone(sharp_dir: Path, attention: str) -> None:
    """Side by side in one pack, under another kernel: even where attention is sharp, no ratio
    leaves the usual trust region for the position it is at."""
    trainer = trainer_options(compute_dtype="bfloat16", attention=attention, pack_tokens=1 << 20)
    learner, _ = learner_of(sharp_dir, algorithm_options("longcat", "behaviour"), trainer)
    documents = documents_of(3000, 3)
    packed = torch.stack(learner.scorer.score(documents, [0] * 3))
    plain = load_policy(sharp_dir, trainer_options(compute_dtype="bfloat16", attention="loop"))
    ratio = (torch.stack(score(plain, documents, 1.0, pack_tokens=1)) - packed)[:, 1500:].exp()
    assert ratio.min() > 0.8 and ratio.max() < 1.28


@pytest.mark.parametrize("form", FORMS)
def test_a_trained_policy_meets_its_sealed_version(model_dir: Path, form: str) -> None:
    """Not at the start only: masters and adapters that training has moved."""
    trainer = trainer_options(form, compute_dtype="bfloat16", lr=1e-2, updates_per_step=2)
    learner, store = learner_of(model_dir, algorithm_options("longcat", "behaviour"), trainer)
    assert run_step(learner)["ppo_kl"] > 0.0  # the second update met other weights
    learner.publish(store, 2).result()
    check_sealed_scores(learner, documents_of(90, 3), version=2)
