"""The frozen weights under LoRA versions, known by their checksum.

They are read from the model directory by everybody who needs them and are no part of a sealed
version; a version names their checksum instead. Invariant: an adapter is never used on another base
than the one it was trained on.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.model.directory import HfDirectory
from dora_rl.model.sealed import CheckedSource, check_base
from dora_rl.trainer.policy.lora import whole_version
from dora_rl.workers.engines import adapter_rank


@cache
def base_checksum(path: Path) -> str:
    """Of a model directory's weights, however they are split into files. Once per process."""
    return CheckedSource(HfDirectory(path)).checksum()


def run_base(config: RunConfig) -> str:
    """What a run's versions name; empty where they are whole weights, or nothing is hashed."""
    verify = adapter_rank(config) and config.rollout.verify_weights
    return base_checksum(Path(config.model.path)) if verify else ""


def whole(sealed: Any, path: Path) -> Any:
    """A sealed version as whole weights: an adapter is merged with the base in a directory."""
    if sealed.base:
        check_base(sealed, base_checksum(path), str(path))
    return whole_version(sealed, path)
