"""Tiny random models of each family, made once per test session and saved as users save them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB = 97
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
# Windows shorter than the prompts, and none that ends where a block does.
_FEW = {"sliding_window": 11}
_BY_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_LONGROPE = {  # three quarters of a head are rotated
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    "partial_rotary_factor": 0.75,
}
_PHI = {"pad_token_id": 0, "eos_token_id": None}
_GLM = {"head_dim": 16, "attention_bias": True, "pad_token_id": 0, "eos_token_id": [96]}
_MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}

FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE)),
    "llama-bias": lambda: LlamaForCausalLM(
        LlamaConfig(attention_bias=True, mlp_bias=True, **_SHAPE)
    ),
    "llama-llama3": lambda: LlamaForCausalLM(LlamaConfig(rope_parameters=_LLAMA3, **_SHAPE)),
    "llama-linear": lambda: LlamaForCausalLM(LlamaConfig(rope_parameters=_LINEAR, **_SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SHAPE)),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **_SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=32, **_SHAPE)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(head_dim=32, tie_word_embeddings=True, **_SHAPE)
    ),
    "qwen3-yarn": lambda: Qwen3ForCausalLM(
        Qwen3Config(head_dim=16, rope_parameters=_YARN, tie_word_embeddings=True, **_SHAPE)
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(norm_topk_prob=True, **_MOE, **_SHAPE)),
    "qwen3-moe-mixed": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(mlp_only_layers=[0], **_MOE, **_SHAPE)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_FEW, **_SHAPE)),
    "ministral": lambda: MinistralForCausalLM(
        MinistralConfig(
            head_dim=32,
            sliding_window=37,
            layer_types=["sliding_attention", "full_attention"],
            **_SHAPE,
        )
    ),
    "smollm3": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(
            no_rope_layers=[1, 0],
            use_sliding_window=True,
            attention_bias=True,
            mlp_bias=True,
            **_FEW,
            **_SHAPE,
            pad_token_id=None,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            head_dim=32,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=_BY_TYPE,
            attention_bias=True,
            **_FEW,
            **_SHAPE,
        )
    ),
    "olmo3": lambda: Olmo3ForCausalLM(
        Olmo3Config(
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=_BY_TYPE | {"full_attention": _YARN},
            attention_bias=True,
            **_FEW,
            **_SHAPE,
        )
    ),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(attention_bias=True, **_SHAPE)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(sliding_window=21, **_PHI, **_SHAPE)),
    "phi3-long": lambda: Phi3ForCausalLM(
        Phi3Config(
            rope_parameters=_LONGROPE,
            original_max_position_embeddings=256,
            tie_word_embeddings=True,
            **_PHI,
            **_SHAPE,
        )
    ),
    "glm": lambda: GlmForCausalLM(GlmConfig(**_GLM, **_SHAPE)),
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(partial_rotary_factor=0.25, **_GLM, **_SHAPE)),
}


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A model whose logits are far from flat, so that greedy choices are clear."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return model


def save_model(family: str, path: Path, seed: int = 0, **changes: object) -> PreTrainedModel:
    model = make_model(family, seed)
    model.save_pretrained(path, **changes)
    return model
