"""One reader of Hugging Face configs: what the file does not say is what transformers says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from dora_rl.model.directory import HfDirectory, check_files, read_spec
from dora_rl.model.families import spec_from_config
from dora_rl.model.rope import inverse_frequencies
from dora_rl.model.spec import NotSupported
from dora_rl.types import UserError

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "ministral": (MinistralConfig, MinistralForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM),
    "glm": (GlmConfig, GlmForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
}
LAYERS = 6  # some have what others have not, in the families where layers differ
GEMMA, MINISTRAL = "Gemma3ForCausalLM", "MinistralForCausalLM"
OWN = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32},
    "ministral": {"head_dim": 16},  # without it transformers fails
}
SMALL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # there are few tokens


@pytest.mark.parametrize("family", CLASSES)
def test_what_the_file_does_not_say_is_what_transformers_says(family: str, tmp_path: Path) -> None:
    """A config with the bare minimum: the model that transformers makes of it is read."""
    kind, model = CLASSES[family]
    shape = SHAPE | {"num_hidden_layers": LAYERS} | OWN.get(family, {})
    made = model(kind(**shape, **SMALL_IDS))
    made.save_pretrained(tmp_path)
    bare = shape | {"architectures": [model.__name__]}
    (tmp_path / "config.json").write_text(json.dumps(bare))
    (tmp_path / "generation_config.json").unlink()
    spec = read_spec(tmp_path)
    check_files(tmp_path, spec)
    assert spec.context_max == made.config.max_position_embeddings
    assert spec.norm_eps == made.config.rms_norm_eps
    attention = made.model.layers[0].self_attn
    assert spec.head_dim == attention.head_dim
    assert spec.num_heads * spec.head_dim == attention.o_proj.in_features
    assert [spec.window_of(i) for i in range(LAYERS)] == [
        _window(layer) for layer in made.model.layers
    ]
    for i, layer in enumerate(made.model.layers):
        theirs = made.config.rope_parameters, made.model.rotary_emb, ""
        if (kind := (getattr(made.config, "layer_types", None) or [""] * LAYERS)[i]) in theirs[0]:
            theirs = theirs[0][kind], theirs[1], f"{kind}_"
        rope = spec.rope_of(i)
        if getattr(layer.self_attn, "use_rope", True):
            assert rope.theta == theirs[0]["rope_theta"]
            freq, factor = inverse_frequencies(rope, spec.head_dim)
            assert torch.equal(freq, getattr(theirs[1], f"{theirs[2]}inv_freq"))
            assert factor == getattr(theirs[1], f"{theirs[2]}attention_scaling")
        else:
            assert rope.kind == "none"


def _window(layer: Any) -> int:
    attention = layer.self_attn
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", 0)) or 0


def test_experts_in_some_layers_only() -> None:
    config = SHAPE | {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4}
    spec = spec_from_config(config | {"decoder_sparse_step": 2, "num_experts": 8})
    assert spec.moe is not None and spec.moe.sparse_layers == (1, 3)
    assert [spec.is_sparse(i) for i in range(4)] == [False, True, False, True]
    assert spec_from_config(config | {"num_experts": 0}).moe is None
    assert spec_from_config(config | {"mlp_only_layers": [0, 1, 2, 3]}).moe is None


def test_the_record_of_a_tokens_experts_is_counted_with_its_keys_and_values() -> None:
    config = SHAPE | {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4}
    few, many = (
        spec_from_config(config | {"num_experts": num, "num_experts_per_tok": 8})
        for num in (255, 256)
    )
    for spec, dtype, num_bytes in ((few, "uint8", 4 * 8), (many, "int16", 2 * 4 * 8)):
        assert spec.moe is not None and spec.moe.routing_dtype == dtype
        assert np.iinfo(dtype).max >= spec.moe.num_experts, "one number means: not recorded"
        assert spec.kv_token_bytes(2, routing=True) == spec.kv_token_bytes(2) + num_bytes
    dense = spec_from_config(SHAPE | {"architectures": ["Qwen3ForCausalLM"]})
    assert dense.kv_token_bytes(2, routing=True) == dense.kv_token_bytes(2)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"architectures": ["OtherForCausalLM"]}, "architecture OtherForCausalLM; the engine"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window attention"),
        ({"architectures": [GEMMA], "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"architectures": [GEMMA], "use_bidirectional_attention": True}, "use_bidirectional"),
        ({"architectures": [GEMMA], "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"architectures": [MINISTRAL], "layer_types": ["chunked_attention"] * 2}, "type 'chunked"),
        ({"rope_scaling": {"type": "mrope"}}, "unknown rope type 'mrope'"),
    ],
)
def test_what_is_not_supported_is_said(change: dict[str, object], line: str) -> None:
    with pytest.raises(NotSupported, match=line):
        spec_from_config(SHAPE | {"architectures": ["LlamaForCausalLM"]} | change)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 2.0}
ODD_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_scaling": YARN | {"factor": None}},
    {"rope_scaling": YARN, "original_max_position_embeddings": 64},
    {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    {"rope_scaling": LINEAR, "rope_theta": 300.0},
    {"rope_theta": None},
    {"partial_rotary_factor": None},
)


@pytest.mark.parametrize("change", ODD_ROPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3", "glm4", "olmo3", "gemma3"])
def test_odd_rotary_positions_are_those_of_transformers(
    family: str, change: dict[str, Any], tmp_path: Path
) -> None:
    kind, model = CLASSES[family]
    shape = SHAPE | SMALL_IDS | {"num_hidden_layers": LAYERS, "head_dim": 16}
    raw = shape | {"architectures": [model.__name__], "max_position_embeddings": 512} | change
    file = tmp_path / "config.json"
    file.write_text(json.dumps(raw))
    try:
        config = kind.from_pretrained(tmp_path)
        theirs = model(config).model.rotary_emb
    except Exception:  # noqa: BLE001 - what transformers does not take
        return
    spec = spec_from_config(raw)
    for i in range(LAYERS):
        prefix = f"{(getattr(config, 'layer_types', None) or [''] * LAYERS)[i]}_"
        prefix = prefix if hasattr(theirs, f"{prefix}inv_freq") else ""
        if (rope := spec.rope_of(i)).kind != "none":
            freq, factor = inverse_frequencies(rope, spec.head_dim)
            assert torch.allclose(freq, getattr(theirs, f"{prefix}inv_freq"), rtol=1e-6)
            assert factor == pytest.approx(getattr(theirs, f"{prefix}attention_scaling"))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rope_theta": 0}, "rope_theta must be above 0"),
        ({"rope_theta": "nan"}, "value that cannot be"),
        ({"rms_norm_eps": None}, "value that cannot be"),
        ({"num_hidden_layers": "many"}, "value that cannot be"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0}, "cannot be"),
        ({"architectures": [GEMMA], "sliding_window_pattern": None}, "value that cannot be"),
        ({"architectures": [GEMMA], "final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"architectures": [GEMMA], "rope_scaling": {"type": "linear"}}, "needs rope_type"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "layer_types": ["sliding_attention"] * 2},
            "which is off",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_in_a_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as info:
        spec_from_config(SHAPE | {"architectures": ["LlamaForCausalLM"]} | change)
    assert "\n" not in str(info.value)


def test_files_that_do_not_fit_the_index_are_refused(tmp_path: Path) -> None:
    made = LlamaForCausalLM(LlamaConfig(**SHAPE))
    made.save_pretrained(tmp_path, max_shard_size="40KB")
    spec, index = read_spec(tmp_path), tmp_path / "model.safetensors.index.json"
    check_files(tmp_path, spec)
    reader = HfDirectory(tmp_path)
    assert len(reader.files) > 1
    state = made.state_dict()
    assert all(torch.equal(reader.tensor(name), state[name]) for name in reader.names())
    listed = json.loads(index.read_text())
    listed["weight_map"]["more.weight"] = reader.files[0].name
    index.write_text(json.dumps(listed))
    with pytest.raises(UserError, match=r"no tensor more.weight, which model.safetensors.index"):
        check_files(tmp_path, spec)
    index.write_text("[]")
    with pytest.raises(UserError, match="not an index of safetensors"):
        check_files(tmp_path, spec)
