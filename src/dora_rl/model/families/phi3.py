"""Phi-3 and Phi-4: Llama with fused projections, heads that may be rotated in part, and the scaling
`longrope`, of which texts up to the length of the pre-training are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dora_rl.model.spec import ModelSpec, dense_spec, read_rope

ARCHITECTURES = ("Phi3ForCausalLM",)
DEFAULTS = {  # where a file is silent
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}
OLD_NAMES = ("su", "yarn")  # of `longrope`, in files of this family


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    config = {**DEFAULTS, **config}
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key) or {}
        kind = given.get("rope_type") or given.get("type")
        if kind in OLD_NAMES:
            config[key] = {**given, "rope_type": "longrope"}
    rope = read_rope(config, int(config["max_position_embeddings"]), where, share=1.0)
    made = dense_spec(config, "phi3", where, rope=rope, fused_qkv=True, fused_gate_up=True)
    window = int(config.get("sliding_window") or 0)
    narrow = 0 < window < made.context_max
    return replace(made, windows=(window,) * made.num_layers) if narrow else made
