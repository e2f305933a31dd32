"""Qwen3 dense: no biases by default, RMS norm on every query and key head."""

from __future__ import annotations

from typing import Any

from dora_rl.engine.spec import ModelSpec, dense_spec

ARCHITECTURES = ("Qwen3ForCausalLM",)


def spec(config: dict[str, Any], where: str) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    head_dim = int(config.get("head_dim") or 128)
    return dense_spec(
        config, "qwen3", where, qk_norm=True, qkv_bias=bias, o_bias=bias, head_dim=head_dim
    )
