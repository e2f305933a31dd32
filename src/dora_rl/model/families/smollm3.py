"""SmolLM3: Llama whose every fourth layer knows no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_rl.model.spec import NO_ROPE, ModelSpec, NotSupported, dense_spec, read_rope, read_windows
from dora_rl.types import UserError

ARCHITECTURES = ("SmolLM3ForCausalLM",)


def spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    layers, bias = range(int(config.get("num_hidden_layers", 0))), config.get("attention_bias")
    step = int(config.get("no_rope_layer_interval", 4))
    turned = config.get("no_rope_layers") or [(i + 1) % step for i in layers]  # 0: without
    if len(turned) < len(layers):
        raise UserError(f"{where}: no_rope_layers says nothing of some layers")
    config = {"tie_word_embeddings": True, **config}
    context = int(config.get("max_position_embeddings") or 32_768)
    rope = read_rope(config, context, where, theta=2_000_000.0)
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    usual = ["full_attention" if not window or turned[i] else "sliding_attention" for i in layers]
    if not window and "sliding_attention" in (config.get("layer_types") or ()):
        raise NotSupported(f"{where}: layer_types has sliding_attention, which is off")
    return dense_spec(
        config,
        "smollm3",
        where,
        context=context,
        rope=rope,
        ropes=tuple(rope if turned[i] else NO_ROPE for i in layers),
        windows=read_windows(config, usual, window, where),
        qkv_bias=bool(bias),
        o_bias=bool(bias),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
