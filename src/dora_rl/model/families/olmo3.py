"""OLMo 3: OLMo 2 with three layers that see a window for each that sees all, which alone has scaled
rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dora_rl.model.families import olmo2
from dora_rl.model.spec import ModelSpec, read_rope, read_windows, rope_of_type

ARCHITECTURES = ("Olmo3ForCausalLM",)


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    layers = range(int(config.get("num_hidden_layers", 0)))
    usual = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in layers]
    windows = read_windows(config, usual, config.get("sliding_window", 4096), where)
    whole = rope_of_type(config, "full_attention", where)
    made = olmo2.spec({**whole, "layer_types": None}, where)
    # As transformers has it: rope_theta of older files is that of the layers that see all.
    local = {**rope_of_type(config, "sliding_attention", where), "rope_theta": None}
    near, far = (read_rope(c, made.context_max, where, 500_000.0) for c in (local, whole))
    ropes = tuple(near if window else far for window in windows)
    return replace(made, family="olmo3", rope=far, ropes=ropes, windows=windows)
