"""Mistral and Ministral: Llama without biases; a query sees so many of the newest tokens, of
Ministral in some layers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_rl.model.spec import ModelSpec, dense_spec, read_windows

ARCHITECTURES = ("MistralForCausalLM", "MinistralForCausalLM")


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    window = config.get("sliding_window", 4096)
    usual = ["sliding_attention" if window else "full_attention"]
    if "MistralForCausalLM" in config["architectures"]:  # which reads no layer_types
        config = {**config, "layer_types": None}
    windows = read_windows(config, usual * int(config.get("num_hidden_layers", 0)), window, where)
    return dense_spec(config, "mistral", where, context=131_072, windows=windows)
