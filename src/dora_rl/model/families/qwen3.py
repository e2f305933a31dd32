"""Qwen3 dense: no biases by default, RMS norm on every query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_rl.model.spec import ModelSpec, dense_spec

ARCHITECTURES = ("Qwen3ForCausalLM",)


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return dense_spec(
        config,
        "qwen3",
        where,
        head_dim=128,
        context=32_768,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )
