"""Distillation in whole runs: a teacher that is held, and one that is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dora_rl.cli import main
from tests.kit.places import MODEL, ROOT
from tests.unit.serve.serving import serving

RECIPE = ROOT / "recipes" / "distill.toml"
SMALL = (
    "rollout.tokens_max=16",
    "orchestration.num_steps=3",
    "orchestration.batch_groups=4",
    "evaluation.num_prompts=2",
    "runtime.world=inline",
)


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "step" in line]


def trained(run_dir: Path, *more: str) -> list[dict[str, Any]]:
    options = (*SMALL, *more, f"runtime.run_dir={run_dir}")
    assert main(["train", str(RECIPE), *options]) == 0
    return lines_of(run_dir)


def test_a_served_teacher_is_as_good_as_a_held_one(tmp_path: Path) -> None:
    """One step, the same samples: what the endpoint says is what the learner would have said."""
    same = ("algorithm.distill_in=advantage", "orchestration.num_steps=1", "runtime.seed=3")
    held = trained(tmp_path / "held", *same, f"trainer.teacher_model={MODEL}")
    with serving(MODEL) as server:
        asked = (
            "trainer.teacher_model=",
            f"reward.teacher_url={server.server.url}",
            "reward.teacher_name=tiny",
        )
        served = trained(tmp_path / "served", *same, *asked)
    assert served[0]["num_tokens"] == held[0]["num_tokens"]
    assert served[0]["distill_kl"] == pytest.approx(held[0]["distill_kl"], abs=1e-4)
    assert served[0]["loss"] == pytest.approx(held[0]["loss"], abs=1e-4)
