"""Qwen2 and Qwen2.5: Llama with a bias on the query, key and value projections."""

from __future__ import annotations

from typing import Any

from dora_rl.engine.spec import ModelSpec, dense_spec

ARCHITECTURES = ("Qwen2ForCausalLM",)


def spec(config: dict[str, Any], where: str) -> ModelSpec:
    return dense_spec(config, "qwen2", where, qkv_bias=True)
