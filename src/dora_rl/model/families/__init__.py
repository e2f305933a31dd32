"""The model families that engine and learner know. Adding one is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from dora_rl.model.spec import ModelSpec, NotSupported
from dora_rl.types import UserError

FAMILIES = (
    "dora_rl.model.families.gemma3",
    "dora_rl.model.families.glm",
    "dora_rl.model.families.llama",
    "dora_rl.model.families.mistral",
    "dora_rl.model.families.olmo2",
    "dora_rl.model.families.olmo3",
    "dora_rl.model.families.phi3",
    "dora_rl.model.families.qwen2",
    "dora_rl.model.families.qwen3",
    "dora_rl.model.families.qwen3_moe",
    "dora_rl.model.families.smollm3",
)


def spec_from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """The spec of a parsed Hugging Face config, or one line that says what is not supported."""
    modules = [import_module(name) for name in FAMILIES]
    known = {name: module.spec for module in modules for name in module.ARCHITECTURES}
    names = config.get("architectures") or []
    for name in names:
        if name in known:
            try:
                return known[name](config, where)
            except (TypeError, ValueError, ArithmeticError) as error:
                raise UserError(f"{where} has a value that cannot be: {error}") from None
    raise NotSupported(
        f"{where}: architecture {', '.join(names) or 'missing'}; "
        f"the engine knows {', '.join(sorted(known))}"
    )
