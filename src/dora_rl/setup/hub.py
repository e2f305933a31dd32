"""A model that is named by its id on the Hugging Face hub, as a directory of this machine."""

from __future__ import annotations

import re
from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.types import UserError
from dora_rl.user_code import one_line

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py"]


def with_local_model(config: RunConfig) -> RunConfig:
    """The configuration with a directory in the place of a hub id."""
    return config.changed("model", path=local_model(config.model.path))


def local_model(name: str) -> str:
    """What is no directory and looks like an id is downloaded, or found where it was before."""
    if Path(name).expanduser().exists() or not _ID.fullmatch(name):
        return name
    try:
        from huggingface_hub import snapshot_download

        return snapshot_download(name, allow_patterns=_FILES)
    except Exception as error:
        # Whatever the library, the network and the hub may raise.
        raise UserError(
            f"model.path: {name} is no directory here, and it cannot be had from the hub "
            f"({one_line(error)}); check the name, or download it elsewhere with  hf download "
            f"{name} --local-dir DIR  and give DIR"
        ) from error
