"""Distillation in whole runs: a teacher that is held, and one that is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dora_rl.cli import main
from tests.kit.places import MODEL, ROOT
from tests.kit.served_teacher import right, teacher
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
    path = run_dir / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
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


def served_by(url: str, run_dir: Path) -> tuple[str, ...]:
    return (
        *SMALL,
        "algorithm.distill_in=advantage",
        "trainer.teacher_model=",
        f"reward.teacher_url={url}",
        "reward.teacher_name=tiny",
        "reward.attempts=1",
        f"runtime.run_dir={run_dir}",
    )


def test_a_teacher_that_fails_costs_samples_and_says_why(tmp_path: Path, capsys: Any) -> None:
    """It answers the start, and from then on without log-probs."""
    asked: list[int] = []

    def answer(ids: list[int]) -> dict[str, Any]:
        asked.append(len(ids))
        told = right(ids)["logprobs"] | {"tokens": [f"bytes:{token}" for token in ids]}
        return {"logprobs": told if len(asked) == 1 else None}

    with teacher(answer) as section:
        options = served_by(section.teacher_url, tmp_path / "run")
        assert main(["train", str(RECIPE), *options]) != 0
    said = capsys.readouterr()
    assert "the answer of the teacher is no completion" in said.err + said.out
    assert len(asked) > 1 and not lines_of(tmp_path / "run")


def test_a_teacher_that_is_away_is_one_line_at_the_start(tmp_path: Path, capsys: Any) -> None:
    with teacher(right) as section:
        options = served_by(section.teacher_url, tmp_path / "run")
    assert main(["check", str(RECIPE), *options]) != 0
    said = capsys.readouterr().err.strip()
    assert "cannot reach the teacher" in said and "\n" not in said


def test_another_tokenizer_is_one_line_at_the_start(tmp_path: Path, capsys: Any) -> None:
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    path = other / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    vocab["3"], vocab["4"] = vocab["4"], vocab["3"]
    path.write_text(json.dumps(data))
    assert main(["check", str(RECIPE), f"trainer.teacher_model={other}"]) != 0
    said = capsys.readouterr().err.strip()
    assert "the tokenizer of" in said and "token '3'" in said and "\n" not in said


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (["trainer.teacher_model="], "needs a teacher"),
        (["reward.teacher_url=http://a/v1"], "are two teachers"),
        (["trainer.teacher_model=", "reward.teacher_url=http://a/v1"], "whole distributions"),
        (["orchestration.filter_equal=true"], "every sample teaches"),
        (["model.path=recipes/models/tiny_tools"], "has 16 tokens, the model has"),
    ],
)
def test_what_cannot_be_is_one_line(
    change: list[str], line: str, tmp_path: Path, capsys: Any
) -> None:
    options = (*SMALL, *change, f"runtime.run_dir={tmp_path / 'run'}")
    assert main(["check", str(RECIPE), *options]) != 0
    said = capsys.readouterr().err.strip()
    assert line in said and "\n" not in said


def test_a_run_of_before_goes_on(tmp_path: Path) -> None:
    """Its config.json has none of the keys that came with distillation."""
    from dora_rl.config.on_resume import RULES
    from dora_rl.controller.run_dir import check_same_run
    from dora_rl.setup.settings import load_config

    config = load_config(ROOT / "recipes" / "quickstart.toml")
    old = config.model_dump(mode="json")
    new = [key for key in RULES if "distill" in key or "teacher" in key]
    for key in new:
        section, name = key.split(".")
        del old[section][name]
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert len(new) == 8
    check_same_run(config, tmp_path)


@pytest.mark.full
def test_the_divergence_falls_by_four_fifths(tmp_path: Path) -> None:
    """The recipe as it is."""
    options = ("evaluation.num_prompts=20", f"runtime.run_dir={tmp_path / 'run'}")
    assert main(["train", str(RECIPE), *options]) == 0
    found = [line["distill_kl"] for line in lines_of(tmp_path / "run")]
    assert sum(found[-10:]) / 10 < 0.2 * found[0]
