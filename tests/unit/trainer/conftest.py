"""Fixtures of the trainer's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.trainer_cases import write_tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
