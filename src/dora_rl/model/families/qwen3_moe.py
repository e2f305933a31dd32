"""Qwen3-MoE: Qwen3 attention; most layers send each token to a few of many small experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_rl.model.spec import ModelSpec, MoeSpec, dense_spec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return dense_spec(
        config,
        "qwen3_moe",
        where,
        context=32_768,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        moe=read_experts(config),
    )


def read_experts(config: Mapping[str, Any]) -> MoeSpec | None:
    """None where every layer is dense."""
    given = config.get("num_experts", config.get("num_local_experts"))
    num_experts = 128 if given is None else int(given)
    step = int(config.get("decoder_sparse_step", 1))
    dense = set(config.get("mlp_only_layers") or ())
    layers = range(int(config.get("num_hidden_layers", 0)))
    sparse = tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
    if not num_experts or not sparse:
        return None
    return MoeSpec(
        num_experts=num_experts,
        top_k=int(config.get("num_experts_per_tok", 8)),
        intermediate=int(config.get("moe_intermediate_size", 768)),
        normalise=bool(config.get("norm_topk_prob", False)),
        sparse_layers=sparse,
    )
