"""What is compiled before the first step serves all of them, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.warm_up import PACK_MIN, layout_of, pack_sizes, warm_up
from tests.kit.trainer_cases import changed, flat, make_groups

TRAINER = TrainerConfig(lr=1e-3, device="cpu", compile="on", pack_tokens=64)


@pytest.fixture(autouse=True)
def captured_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are captured as for a compiler, and then run as they are."""
    compile_: Any = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile_(f, backend="eager", **how))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def train(learner: Learner) -> None:
    for step in range(2):
        learner.begin_step(step)
        learner.feed(make_groups(step, 3, version=step))
        learner.finish_step()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "entropy": ({"entropy_coef": 0.01}, {}),
    "reference": ({"kl_coef": 0.1}, {}),
    "critic": ({"loss": "ppo", "advantage": "gae"}, {}),
    "adapters": ({}, {"lora_rank": 4}),
    "checkpointing": ({}, {"activation_checkpointing": "layer"}),
}


@pytest.mark.parametrize("case", CASES)
def test_no_step_compiles_after_a_warm_up_and_it_leaves_no_trace(
    model_dir: Path, case: str
) -> None:
    algorithm, trainer = CASES[case]
    compiled = changed(TRAINER, **trainer)
    warm, cold, plain = (
        Learner(model_dir, AlgorithmConfig(**algorithm), options)
        for options in (compiled, compiled, changed(compiled, compile="off"))
    )
    warm_up(warm, step_tokens_max=48)
    assert all(p.grad is None for p in warm.policy.parameters())
    num_compiled = counters["stats"]["unique_graphs"]
    assert num_compiled >= 2
    for learner in (warm, cold, plain):
        train(learner)
    assert counters["stats"]["unique_graphs"] == num_compiled
    assert torch.equal(flat(warm), flat(cold))
    assert (flat(warm) - flat(plain)).abs().max() < 1e-4


def test_where_nothing_is_compiled_nothing_is_run(model_dir: Path) -> None:
    learner = Learner(model_dir, AlgorithmConfig(), changed(TRAINER, compile="off"))
    learner.policy.forward = None  # type: ignore[method-assign]
    warm_up(learner, step_tokens_max=48)


@given(st.integers(2, 200_000))
def test_every_size_is_near_one_that_was_compiled_for(tokens_max: int) -> None:
    sizes = pack_sizes(tokens_max)
    assert sizes[0] == tokens_max and len(set(sizes)) == len(sizes) < 40
    assert all(size > 1 for size in sizes)
    assert all(b >= (a - 1) // 2 for a, b in pairwise(sizes)), "a gap of more than a half"
    assert min(sizes) <= max(2 * PACK_MIN, 2)


@given(st.integers(2, 5000), st.integers(2, 600))
def test_made_up_documents_fit_the_model(size: int, longest: int) -> None:
    layout = layout_of(size, longest, torch.device("cpu"))
    assert layout.num_tokens == size and layout.length_max <= longest
