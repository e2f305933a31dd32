"""GLM-4 in both forms, `glm` and `glm4`: the first half of a head is rotated, neighbours as pairs;
biases on queries, keys and values; gate and up are one matrix. `glm4` has norms behind both halves
of a block too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dora_rl.model.spec import PRE_NORMS, ModelSpec, dense_spec, read_rope

ARCHITECTURES = ("GlmForCausalLM", "Glm4ForCausalLM")
DEFAULTS = {  # where a file is silent
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
}
NORMS = {
    "GlmForCausalLM": PRE_NORMS,
    "Glm4ForCausalLM": (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
}


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    config = {**DEFAULTS, **config}
    rope = read_rope(config, int(config["max_position_embeddings"]), where, share=0.5)
    norms = next(NORMS[name] for name in config["architectures"] if name in NORMS)
    return dense_spec(
        config,
        "glm" if norms == PRE_NORMS else "glm4",
        where,
        head_dim=128,
        rope=replace(rope, interleaved=True),
        qkv_bias=bool(config.get("attention_bias", True)),
        fused_gate_up=True,
        norms=norms,
    )
