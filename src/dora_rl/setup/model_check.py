"""Whether a directory holds a model that can be loaded: its configuration, its files' heads."""

from __future__ import annotations

from pathlib import Path

from dora_rl.model.directory import check_files, read_spec
from dora_rl.types import UserError


def check_weights(path: Path, key: str) -> None:
    """A Hugging Face directory of a known architecture with whole safetensors. `key` named it."""
    if not path.is_dir():
        raise UserError(
            f"{key}: {path} is not a directory with a Hugging Face model; give its path, or "
            f"fetch one with: hf download ID --local-dir DIR"
        )
    spec = read_spec(path)
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{key}: no *.safetensors in {path}; convert the model to safetensors")
    check_files(path, spec)


def check_model_files(path: Path) -> None:
    """The model to train: weights and a tokenizer."""
    check_weights(path, "model.path")
    if not any(path.glob("tokenizer*")) and not any(path.glob("vocab*")):
        raise UserError(f"model.path: no tokenizer in {path}; copy tokenizer.json into it")
