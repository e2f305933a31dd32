"""Sampling and learning speak of the same distribution: with a learning rate of 0, on-policy, every
ratio is 1 up to rounding.

What was sampled under truncation is not of that distribution. Its ratios show why a run that would
train on it is refused (`test_learner_check.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.trainer.learner import Learner
from dora_rl.types import Group, RequestId, SamplingParams

# Rounding of bfloat16 between two programs; of float32 next to none.
GAP_MAX = {"float32": 1e-5, "bfloat16": 0.03}


def sampled(model_dir: Path, params: SamplingParams, dtype: str) -> list[Group]:
    """Four groups of four responses, as the engine reports them, with made-up rewards."""
    engine = Engine(read_spec(model_dir), EngineOptions(dtype=dtype))
    engine.load(0, str(model_dir))
    for group in range(4):
        for sample in range(4):
            prompt = (1 + group, 2, 3)
            engine.submit(Request(RequestId(group, sample), 0, prompt, params, seed=1))
    done = []
    while engine.has_work():
        done += [o.trajectory for o in engine.step() if o.trajectory is not None]
    groups = []
    for group in range(4):
        mine = [t for t in done if t.request.group == group]
        rewarded = [replace(t, reward=float(t.request.sample % 2)) for t in mine]
        groups.append(Group(group, 0, mine[0].prompt_ids, tuple(rewarded)))
    return groups


def metrics_of(
    model_dir: Path, params: SamplingParams, dtype: str, **options: Any
) -> dict[str, float]:
    algorithm = AlgorithmConfig(temperature=params.temperature, **options)
    trainer = TrainerConfig(lr=0.0, device="cpu", compute_dtype=dtype, pack_tokens=256)
    learner = Learner(model_dir, algorithm, trainer, batch_groups=4)
    learner.begin_step(0)
    learner.feed(sampled(model_dir, params, dtype))
    return learner.finish_step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_ratio_is_one(model_dir: Path, temperature: float, dtype: str) -> None:
    params = SamplingParams(tokens_max=24, temperature=temperature, ignore_eos=True)
    for loss in ("grpo", "dapo", "gspo"):
        # Of bfloat16 single tokens may be a tenth apart between the engine and the learner.
        clip = {"float32": 0.001, "bfloat16": 0.2}[dtype]
        clips = {"clip_low": clip, "clip_high": clip}
        metrics = metrics_of(model_dir, params, dtype, loss=loss, **clips)
        assert metrics["mismatch_abs"] < GAP_MAX[dtype]
        assert metrics["ppo_kl"] < GAP_MAX[dtype] ** 2
        assert metrics["clip_ratio/low"] == metrics["clip_ratio/high"] == 0.0


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_truncated_sampling_is_of_another_distribution(model_dir: Path, cut: Any) -> None:
    params = SamplingParams(tokens_max=24, ignore_eos=True, **cut)
    assert metrics_of(model_dir, params, "float32")["clip_ratio/low"] > 0.4
