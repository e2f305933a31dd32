"""Tiny models of families that run through transformers, every switch of theirs on.

Biases are not zero, soft-caps and scalings are far from neutral, windows are shorter than the
documents. All of `FAMILIES` are trained; `REFUSED` are told why not. The table of docs/models.md
is made from them:

    python -m tests.unit.trainer.foreign_families
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.7,
    "logits_scaling": 2.5,
    "attention_bias": True,
}
MIXED = ["sliding_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "attention_bias": True,
}
HYBRID: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_proj_bias": True,
}

# family -> (config class, what differs from COMMON; GPT-like ones name everything themselves)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", {"head_dim": 16, "attention_bias": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 7,
            "sliding_window": 6,
            "layer_types": MIXED,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 7,
            "sliding_window": 6,
            "layer_types": MIXED,
            "attention_bias": True,
        },
    ),
    "granite": ("GraniteConfig", {**GRANITE, "mlp_bias": True}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": (
        "Cohere2Config",
        {"logit_scale": 0.3, "sliding_window": 6, "layer_types": MIXED, "attention_bias": True},
    ),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi3": ("Phi3Config", {"sliding_window": 6, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 6, "use_bias": True}),
    "stablelm": (
        "StableLmConfig",
        {
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "olmo": ("OlmoConfig", {"clip_qkv": 0.5, "attention_bias": True}),
    "olmo2": ("Olmo2Config", {"attention_bias": True}),
    "olmo3": ("Olmo3Config", {"sliding_window": 6, "layer_types": MIXED}),
    "mistral": ("MistralConfig", {"sliding_window": 6, "head_dim": 16}),
    "gpt_neox": ("GPTNeoXConfig", {"use_parallel_residual": True, "attention_bias": True}),
    "gpt2": ("GPT2Config", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 4, "tie_word_embeddings": False}),
    "gpt_bigcode": ("GPTBigCodeConfig", {**GPT, "multi_query": True}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 6,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "codegen": ("CodeGenConfig", {**GPT, "rotary_dim": 4, "tie_word_embeddings": False}),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": (
        "MptConfig",
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    ),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "xglm": (
        "XGLMConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 1,
        },
    ),
    "biogpt": ("BioGptConfig", {}),
    "falcon": (
        "FalconConfig",
        {"alibi": True, "bias": True, "new_decoder_architecture": False, "multi_query": True},
    ),
    "falcon_rope": (
        "FalconConfig",
        {"alibi": False, "bias": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "mixtral": ("MixtralConfig", {**EXPERTS, "sliding_window": 6, "output_router_logits": True}),
    "phimoe": (
        "PhimoeConfig",
        {
            **EXPERTS,
            "sliding_window": 6,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.1,
            "input_jitter_noise": 0.1,
        },
    ),
    "granitemoe": ("GraniteMoeConfig", {**EXPERTS, **GRANITE}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {**EXPERTS, **GRANITE, "shared_intermediate_size": 24},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**DEEPSEEK, **MLA, "topk_method": "group_limited_greedy", "topk_group": 1},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**DEEPSEEK, **MLA}),
    "glm": ("GlmConfig", {"head_dim": 8, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4Config", {"head_dim": 8, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**DEEPSEEK, "head_dim": 8, "attention_bias": True, "use_qk_norm": True},
    ),
    "qwen2_sliding": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
    "smollm3": (
        "SmolLM3Config",
        {
            "no_rope_layers": [1, 0],
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": MIXED,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "nemotron": (
        "NemotronConfig",
        {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.5},
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 6, "layer_types": MIXED}),
    "ernie4_5": ("Ernie4_5Config", {"use_bias": True, "head_dim": 8}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
            "use_bias": True,
            "moe_layer_start_index": 1,
        },
    ),
    "helium": ("HeliumConfig", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "seed_oss": (
        "SeedOssConfig",
        {"head_dim": 8, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    "arcee": ("ArceeConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "apertus": ("ApertusConfig", {"attention_bias": True}),
    "dots1": (
        "Dots1Config",
        {**DEEPSEEK, "sliding_window": 6, "layer_types": MIXED, "attention_bias": True},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**EXPERTS, "head_dim": 8, "sliding_window": 6, "layer_types": MIXED},
    ),
    "bamba": ("BambaConfig", {**HYBRID, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **HYBRID,
            **EXPERTS,
            **GRANITE,
            "shared_intermediate_size": 24,
            "layer_types": ["mamba", "attention"],
        },
    ),
    "mamba": ("MambaConfig", {"state_size": 8, "use_bias": True, "num_key_value_heads": None}),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "use_bias": True},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {
            "lru_width": 32,
            "attention_window_size": 6,
            "logits_soft_cap": 3.0,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32}),
    "roberta": ("RobertaConfig", {"is_decoder": True, "max_position_embeddings": 70}),
    "ctrl": (
        "CTRLConfig",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "dff": 48,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
        },
    ),
}
# family -> (config class, what differs from COMMON, what the refusal says)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertConfig", {}, "mixes documents or is not causal"),
    "electra": ("ElectraConfig", {"embedding_size": 32}, "mixes documents or is not causal"),
    "xlnet": (
        "XLNetConfig",
        {"vocab_size": VOCAB, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        "does not run through transformers",
    ),
    "t5": ("T5Config", {"d_model": 32}, "it has an encoder"),
    "bart": ("BartConfig", {"d_model": 32}, "it has an encoder"),
    "quantised": (
        "MistralConfig",
        {"quantization_config": {"quant_method": "fp8"}},
        "its weights are quantised",
    ),
}
# Trained in float32 only: family -> what the refusal of half precision says.
FLOAT32_ONLY = {
    "xglm": "does not run in torch.bfloat16",
    "mamba": "a frozen copy of it computes other log-probs",
    "mamba2": "a frozen copy of it computes other log-probs",
}
# Run with the fast tests: one of each kind of trouble.
FAST = (
    "gemma2",
    "granite",
    "cohere",
    "phi",
    "opt",
    "falcon",
    "mixtral",
    "granitemoe",
    "phimoe",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_next",
    "lfm2",
    "biogpt",
)
ALONE = ("n_embd", "d_model", "n_layer", "n_words")


def make_config(family: str) -> Any:
    import transformers

    kind, given = FAMILIES[family] if family in FAMILIES else REFUSED[family][:2]
    whole = (
        given if any(k in given for k in ALONE) or "num_layers" in given else {**COMMON, **given}
    )
    return getattr(transformers, kind)(**whole)


@torch.no_grad()
def write_family(directory: Path, family: str, seed: int = 0) -> Path:
    """Random weights in which nothing is zero, written by transformers itself."""
    from transformers import AutoModelForCausalLM

    config = make_config(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        kept = model.state_dict().keys()
        buffers = [b for n, b in model.named_buffers() if n in kept and b.is_floating_point()]
        for tensor in (*model.parameters(), *buffers):
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
    model.save_pretrained(directory)
    return directory


def switches(family: str) -> str:
    """What of the family is on beyond its defaults, by the names of its config."""
    given = FAMILIES[family][1]
    sizes = (*COMMON, *GPT, "num_layers", "num_heads", "d_model", "n_layers", "n_heads", "ffn_dim")
    names = [k for k in given if k not in sizes and not k.endswith(("_dim", "_size", "_rank"))]
    return ", ".join(f"`{name}`" for name in names)


def table() -> str:
    """The table of docs/models.md."""
    rows = ["| family | configuration of transformers | on in the test |", "|---|---|---|"]
    for family, (kind, _) in FAMILIES.items():
        rows.append(f"| {family} | `{kind}` | {switches(family)} |")
    only = ", ".join(FLOAT32_ONLY)
    why = "In half precision a frozen copy of them would not compute exactly what the policy"
    rows += ["", f"In float32 only: {only}. {why}", "computes, so it is refused."]
    rows += ["", "| refused | configuration of transformers | because |", "|---|---|---|"]
    rows += [f"| {f} | `{kind}` | {why} |" for f, (kind, _, why) in REFUSED.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
