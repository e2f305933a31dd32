"""Qwen2 and Qwen2.5: Llama with a bias on the query, key and value projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_rl.model.spec import ModelSpec, dense_spec

ARCHITECTURES = ("Qwen2ForCausalLM",)


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    return dense_spec(config, "qwen2", where, context=32_768, qkv_bias=True)
