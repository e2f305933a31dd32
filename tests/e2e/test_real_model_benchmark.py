"""The program that measures real models runs from end to end, on a model that fits a laptop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.places import ROOT
from tests.kit.recipe_models import stand_in

PROGRAM = ROOT / "benchmarks" / "real_model.py"


def measure(folder: Path, what: str, *more: str) -> list[dict]:
    words = stand_in(folder, "gsm8k_1.5b")
    own = ("model.path=", "data.", "runtime.run_dir=", "orchestration.num_steps=", "evaluation.")
    small = [word for word in words if not word.startswith(own)]
    command = [sys.executable, str(PROGRAM), "--what", what, "--model", str(folder / "model")]
    command += ["--train", str(folder / "train.jsonl"), "--eval", str(folder / "test.jsonl")]
    command += ["--minutes", "3", "--every", "3", "--prompts", "2", "--final-prompts", "3"]
    command += ["--out", str(folder / "out"), *more, "--set", *small]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "out" / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_is_measured_and_evaluated(tmp_path: Path) -> None:
    (result,) = measure(tmp_path, "train", "--steps", "6")
    assert result["status"] == 0 and result["steps"] == 6 and not result["stopped"]
    steady = result["steady"]
    assert steady["steps"] == [3, 3] and steady["tokens_per_s"] > 0
    assert steady["time/train"]["mean"] > 0 and steady["loaded_after_commit_s"] >= 0
    assert [point["version"] for point in result["curve"]] == [0, 3, 6]
    tokens = [point["tokens_trained"] for point in result["curve"]]
    walls = [point["wall_s"] for point in result["curve"]]
    assert tokens == sorted(tokens) and tokens[0] == 0 < tokens[1] and walls == sorted(walls)
    final = result["final"]
    assert final["num_prompts"] == 3 and final["version"] == 6 and final["num_failed"] == 0
    assert final["strict"] <= final["lenient"] <= 1.0
    assert (tmp_path / "out" / "train.png").stat().st_size > 1000


@pytest.mark.full
def test_modes_are_timed_to_the_same_accuracy(tmp_path: Path) -> None:
    results = measure(tmp_path, "modes", "--steps", "4", "--modes", "multi_version,sync")
    assert [result["name"] for result in results] == ["multi_version", "sync", "time to"]
    assert set(results[-1]["wall_s"]) == {"multi_version", "sync"}
    assert all(wall_s is not None for wall_s in results[-1]["wall_s"].values())
