"""Import paths of earlier releases that the pages named: still work, with one line of warning."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"FutureWarning: {old} is now {new}" in done.stderr


def test_the_old_names_of_sections_are_found_with_a_warning() -> None:
    code = (
        "from dora_rl.trainer.options import AlgorithmOptions, CheckpointOptions, TrainerOptions\n"
        "assert TrainerOptions(lr=1e-4).lr == 1e-4 and AlgorithmOptions().loss == 'grpo'\n"
        "assert CheckpointOptions().keep == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "FutureWarning: dora_rl.trainer.options: AlgorithmOptions" in done.stderr
