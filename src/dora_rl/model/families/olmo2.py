"""OLMo 2: no norm before a half of a block but one behind it; queries and keys are normalised over
all their heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_rl.model.spec import ModelSpec, dense_spec

ARCHITECTURES = ("Olmo2ForCausalLM",)
DEFAULTS = {"rms_norm_eps": 1e-5}  # where a file is silent
NORMS = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    config = {**DEFAULTS, **config}
    bias = bool(config.get("attention_bias", False))
    return dense_spec(
        config,
        "olmo2",
        where,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        qk_norm_whole=True,
        norms=NORMS,
    )
