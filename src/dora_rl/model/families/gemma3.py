"""Gemma 3 (text): five layers that see a window for each that sees all, with rotary bases of their
own; norms of what a layer adds, too; every norm multiplies by 1 + weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_rl.model.spec import (
    ModelSpec,
    NotSupported,
    dense_spec,
    read_rope,
    read_windows,
    rope_of_type,
)

ARCHITECTURES = ("Gemma3ForCausalLM",)
PATTERN = "sliding_window_pattern"
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if (value := config.get(key)) is not None and value is not False:  # a cap of 0 is one
            raise NotSupported(f"{where}: {key} is not supported for runs; see docs/models.md")
    if (act := config.get("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise NotSupported(f"{where}: hidden_activation {act!r}; known: 'gelu_pytorch_tanh'")
    config = {"tie_word_embeddings": True, "num_key_value_heads": 4, **config}
    layers, step = range(int(config.get("num_hidden_layers", 0))), config.get(PATTERN, 6)
    usual = ["sliding_attention" if (i + 1) % step else "full_attention" for i in layers]
    windows = read_windows(config, usual, config.get("sliding_window", 4096), where)
    context = int(config.get("max_position_embeddings") or 131_072)
    local = {**config, "rope_theta": config.get("rope_local_base_freq")}
    whole = read_rope(rope_of_type(config, "full_attention", where), context, where, 1_000_000.0)
    near = read_rope(rope_of_type(local, "sliding_attention", where), context, where, 10_000.0)
    bias = bool(config.get("attention_bias", False))
    return dense_spec(
        config,
        "gemma3",
        where,
        head_dim=256,
        context=context,
        rope=whole,
        ropes=tuple(near if window else whole for window in windows),
        windows=windows,
        norms=NORMS,
        norm_offset=1.0,
        activation="gelu_tanh",
        embed_scale=float(config.get("hidden_size", 0)) ** 0.5,
        query_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
    )
