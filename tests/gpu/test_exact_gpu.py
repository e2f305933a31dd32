"""With lr 0 a policy on a GPU meets itself: flash attention, compiled layers, experts, adapters.

pytest tests/gpu/test_exact_gpu.py -m gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.exact_cases import (
    FORMS,
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
    trainer_options,
    write_exact_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Shapes that the kernels of a GPU take.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
LONG = {**WIDE, "max_position_embeddings": 3200}


def on_gpu(form: str = "whole", **others: Any):
    return trainer_options(form, device="cuda", **{"pack_tokens": 512, **others})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exact_model(tmp_path_factory.mktemp("exact") / "qwen3", "qwen3", **WIDE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("old", ["behaviour", "proximal"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_recipe_sees_no_gap(model_dir: Path, loss: str, old: str, form: str) -> None:
    check_recipe(model_dir, loss, old, on_gpu(form, compute_dtype="bfloat16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("compile_", ["on", "off"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_tied", "qwen3_moe"])
def test_every_family_sees_no_gap(tmp_path: Path, family: str, compile_: str, dtype: str) -> None:
    more = {"moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 6}
    shape = WIDE | (more if family == "qwen3_moe" else {})
    model = write_exact_model(tmp_path / "model", family, **shape)
    trainer = on_gpu(compute_dtype=dtype, compile=compile_)
    if (family, compile_, dtype) == ("qwen3_moe", "on", "float32"):
        # The experts of a token are added up by compiled code, with gradients in another order:
        # the last bit of float32, which bfloat16 does not show.
        pytest.skip("compiled experts in float32 agree to 1e-6, not to the last bit")
    check_recipe(model, "longcat", "behaviour", trainer)
    check_critic(model, trainer)


@pytest.mark.parametrize("compile_", ["on", "off"])
@pytest.mark.parametrize("form", ["adapters", "merged"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3_moe"])
def test_every_family_sees_no_gap_with_adapters(
    tmp_path: Path, family: str, form: str, compile_: str
) -> None:
    more = {"moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 6}
    shape = WIDE | (more if family == "qwen3_moe" else {})
    model = write_exact_model(tmp_path / "model", family, **shape)
    trainer = on_gpu(form, compute_dtype="bfloat16", compile=compile_)
    check_recipe(model, "longcat", "behaviour", trainer)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_models_run_by_transformers_see_no_gap(tmp_path: Path, family: str, form: str) -> None:
    model = write_exact_model(tmp_path / "model", family, **WIDE)
    trainer = on_gpu(form, compute_dtype="bfloat16", implementation="transformers")
    check_recipe(model, "longcat", "behaviour", trainer)


@pytest.mark.parametrize("attention", ["varlen", "flex", "sdpa", "loop"])
def test_late_positions_see_no_gap(tmp_path: Path, attention: str) -> None:
    model = write_exact_model(tmp_path / "model", "qwen3", 2.5, **LONG)
    trainer = on_gpu(compute_dtype="bfloat16", attention=attention, pack_tokens=8192)
    learner, _ = learner_of(model, algorithm_options("longcat", "behaviour"), trainer)
    check_sealed_scores(learner, documents_of(3000, 2))


@pytest.mark.parametrize("others", [other_arithmetic])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_other_kernels_differ_no_more_at_late_positions(
    tmp_path: Path, family: str, others: Any
) -> None:
    model = write_exact_model(tmp_path / "model", family, **LONG)
    trainer = on_gpu(compute_dtype="bfloat16", pack_tokens=1 << 20)
    learner, store = learner_of(model, algorithm_options("longcat", "behaviour"), trainer)
    ours = learner.scorer.score(documents_of(3025, 4), [0] * 4)
    early, late = early_and_late(ours, others(model, learner, store))
    assert 0.0 < late <= 1.5 * early, (early, late)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_engine_is_no_worse_at_late_positions(tmp_path: Path, family: str) -> None:
    """Engine and learner agree better than bfloat16 rounds at early positions, where they sum few
    keys in the same order. So each is held against float32: neither gets worse with position."""
    model = write_exact_model(tmp_path / "model", family, **LONG)
    trainer = on_gpu(compute_dtype="bfloat16", pack_tokens=1 << 20)
    learner, store = learner_of(model, algorithm_options("longcat", "behaviour"), trainer)
    precise = other_arithmetic(model, learner, store)
    engine = by_the_engine(model, learner, store)
    early, late = early_and_late(engine, precise)
    assert 0.0 < late <= 1.5 * early, (early, late)
    ours = learner.scorer.score(documents_of(3025, 4), [0] * 4)
    assert early_and_late(ours, engine)[1] <= 1.5 * early
