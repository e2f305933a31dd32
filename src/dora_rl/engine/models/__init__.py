"""The model families the engine knows. Adding one is one file and one line here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dora_rl.engine.models import llama, qwen2, qwen3, qwen3_moe
from dora_rl.engine.spec import ModelSpec, read_config
from dora_rl.types import UserError

FAMILIES = {
    architecture: module.spec
    for module in (llama, qwen2, qwen3, qwen3_moe)
    for architecture in module.ARCHITECTURES
}


def spec_from_config(config: dict[str, Any], where: str = "config.json") -> ModelSpec:
    """The spec of a parsed Hugging Face config, or one line that says what is not supported."""
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name](config, where)
    known = ", ".join(sorted(FAMILIES))
    raise UserError(
        f"{where}: architecture {', '.join(names) or 'missing'}; the engine knows {known}"
    )


def read_spec(path: str | Path) -> ModelSpec:
    """The spec of a Hugging Face model directory."""
    directory = Path(path)
    return spec_from_config(read_config(directory), str(directory / "config.json"))
