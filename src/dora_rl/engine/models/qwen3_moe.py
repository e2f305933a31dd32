"""Qwen3-MoE: Qwen3 attention; most layers send each token to a few of many small experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from dora_rl.engine.models import qwen3
from dora_rl.engine.spec import ModelSpec, MoeSpec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def spec(config: dict[str, Any], where: str) -> ModelSpec:
    dense = qwen3.spec(config, where)
    step = int(config.get("decoder_sparse_step", 1))
    dense_layers = set(config.get("mlp_only_layers") or ())
    num_experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    sparse = tuple(
        index
        for index in range(dense.num_layers)
        if index not in dense_layers and num_experts > 0 and (index + 1) % step == 0
    )
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=int(config.get("num_experts_per_tok", 8)),
        intermediate=int(config.get("moe_intermediate_size", 768)),
        normalise=bool(config.get("norm_topk_prob", False)),
        sparse_layers=sparse,
    )
    return dataclasses.replace(dense, family="qwen3_moe", moe=moe if sparse else None)
