"""Llama: grouped-query attention, SwiGLU, optional biases, `llama3` RoPE scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_rl.model.spec import ModelSpec, dense_spec

ARCHITECTURES = ("LlamaForCausalLM",)


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    return dense_spec(config, "llama", where, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
