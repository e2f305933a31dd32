"""Shared fixtures: models saved once per session, one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.kit import tiny_models
from tests.kit.engines import Saved


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`saved("qwen3", seed=1)` -> (transformers model, its directory)."""
    made: dict[tuple[str, int], tuple[PreTrainedModel, Path]] = {}

    def get(family: str, seed: int = 0) -> tuple[PreTrainedModel, Path]:
        if (family, seed) not in made:
            path = tmp_path_factory.mktemp(f"{family}-{seed}")
            made[family, seed] = (tiny_models.save_model(family, path, seed), path)
        return made[family, seed]

    return get
