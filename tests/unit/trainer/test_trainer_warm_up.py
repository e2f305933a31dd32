"""What is compiled before the first step serves all of them, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from trainer_cases import flat, make_groups

from dora_rl.trainer.learner import Learner
from dora_rl.trainer.options import AlgorithmOptions, TrainerOptions
from dora_rl.trainer.warm_up import pack_sizes, warm_up

TRAINER = TrainerOptions(lr=1e-3, device="cpu", compile="on", pack_tokens=64)


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


@pytest.mark.parametrize("algorithm", [{}, {"entropy_coef": 0.01}])
def test_no_step_compiles_after_a_warm_up_and_it_leaves_no_trace(
    model_dir: Path, algorithm: dict[str, float]
) -> None:
    warm, cold, plain = (
        Learner(model_dir, AlgorithmOptions(**algorithm), options)  # type: ignore[arg-type]
        for options in (TRAINER, TRAINER, replace(TRAINER, compile="off"))
    )
    warm_up(warm)
    assert all(p.grad is None for p in warm.policy.parameters())
    num_compiled = counters["stats"]["unique_graphs"]
    assert num_compiled >= 2
    for learner in (warm, cold, plain):
        train(learner)
    assert counters["stats"]["unique_graphs"] == num_compiled
    assert torch.equal(flat(warm), flat(cold))
    assert (flat(warm) - flat(plain)).abs().max() < 1e-4


def test_where_nothing_is_compiled_nothing_is_run(model_dir: Path) -> None:
    learner = Learner(model_dir, AlgorithmOptions(), replace(TRAINER, compile="off"))
    learner.policy.forward = None  # type: ignore[method-assign]
    warm_up(learner)


@pytest.mark.parametrize("pack_tokens", [2, 3, 8, 64, 32_768])
def test_sizes_are_different_and_no_pack_is_larger(pack_tokens: int) -> None:
    sizes = pack_sizes(pack_tokens)
    assert len(set(sizes)) == len(sizes) and max(sizes) >= 2
    assert max(sizes) <= max(pack_tokens, 64)
