"""Import paths of earlier releases that the pages named: still work, with one line of warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).parents[3] / "recipes" / "models" / "tiny"


def said_by(code: str) -> str:
    """What a program says on its standard error; it must end well."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(
    ("old", "names", "new"),
    [
        ("dora_rl.engine.models", "read_spec", "dora_rl.model.directory"),
        ("dora_rl.engine.spec", "ModelSpec, dense_spec", "dora_rl.model.spec"),
        ("dora_rl.engine.random_weights", "RandomAdapter", "dora_rl.model.random_weights"),
    ],
)
def test_a_moved_module_is_found_with_a_warning(old: str, names: str, new: str) -> None:
    code = f"from {old} import {names}"
    said = said_by(code)
    assert f"FutureWarning: {old} is now {new}" in said


def test_the_old_names_of_sections_are_found_with_a_warning() -> None:
    code = (
        "from dora_rl.trainer.options import AlgorithmOptions, CheckpointOptions, TrainerOptions\n"
        "assert TrainerOptions(lr=1e-4).lr == 1e-4 and AlgorithmOptions().loss == 'grpo'\n"
        "assert CheckpointOptions().keep == 2\n"
    )
    said = said_by(code)
    assert "FutureWarning: dora_rl.trainer.options: AlgorithmOptions" in said


def test_what_read_a_configuration_for_the_learner_is_found_with_a_warning() -> None:
    code = (
        "from pathlib import Path\n"
        "from dora_rl.trainer.architecture import load_config, read_architecture\n"
        f"config = load_config(Path({str(TINY)!r}))\n"
        "assert read_architecture(config).num_layers == config['num_hidden_layers']\n"
        "assert read_architecture({'architectures': ['UnknownForCausalLM']}) is None\n"
    )
    said = said_by(code)
    assert "FutureWarning: dora_rl.trainer.architecture: load_config" in said


def test_groups_under_their_old_names_are_groups() -> None:
    code = (
        "from dora_rl.runtime.weights import DiskWeightStore\n"
        "from dora_rl.trainer.batch import GroupBatch, Sample\n"
        "good = Sample(token_ids=(3, 4), logprobs=(-1.0, -2.0), loss_mask=(1, 1), reward=1.0)\n"
        "group = GroupBatch(group=1, version=0, prompt_ids=(1, 2), samples=(good,))\n"
        "assert group.id == 1 and group.samples[0].reward == 1.0\n"
    )
    said = said_by(code)
    assert "FutureWarning: dora_rl.trainer.batch: GroupBatch and Sample" in said
    assert "FutureWarning: dora_rl.runtime.weights is now dora_rl.weights.store" in said
