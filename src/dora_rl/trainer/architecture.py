"""What a Hugging Face `config.json` says, as one frozen value the lean decoder is built from.

Reads JSON only; never loads weights or remote code. Invariant: `read_architecture` returns None,
rather than something wrong, for any model the lean decoder does not reproduce exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dora_rl.trainer.rope import ROPE_KINDS, frequencies
from dora_rl.types import UserError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a decoder. `num_experts` 0 means dense."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    positions_max: int
    rope_theta: float
    rope: tuple[tuple[str, Any], ...] = ()
    rope_scale: float = 1.0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    norm_topk: bool = True
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def inv_freq(self) -> Tensor:
        return frequencies(self.head_dim, self.rope_theta, dict(self.rope))

    def is_sparse(self, layer: int) -> bool:
        if not self.num_experts or layer in self.dense_layers:
            return False
        return (layer + 1) % self.sparse_step == 0

    def layer_params_active(self) -> int:
        """Matrix parameters one token meets in one block."""
        d, h = self.head_dim, self.hidden
        attention = h * d * (2 * self.num_heads + 2 * self.num_kv_heads)
        if self.num_experts:
            return attention + 3 * h * self.expert_intermediate * self.experts_per_token
        return attention + 3 * h * self.intermediate

    def train_flops(self, lengths: list[int], adapter_params: int = 0) -> float:
        """Model FLOPs of forward and backward over documents: 6 per parameter and token (the
        output matrix counted, the embedding lookup not), 6·n·width per token for causal
        attention; no recomputation is counted. Where adapters are trained, 4 per frozen parameter:
        it has no gradient of its own."""
        tokens = sum(lengths)
        matrices = self.num_layers * self.layer_params_active() + self.vocab * self.hidden
        width = self.num_heads * self.head_dim
        attention = self.num_layers * width * sum(6.0 * n * n for n in lengths)
        per_token = 4.0 * matrices + 6.0 * adapter_params if adapter_params else 6.0 * matrices
        return per_token * tokens + attention


def load_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of a model directory, or one clear error."""
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"model '{directory}': no config.json; give a Hugging Face model directory")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error


def read_architecture(config: Mapping[str, Any]) -> Architecture | None:
    """The lean decoder's shape, or None if this model must run through transformers."""
    names = config.get("architectures") or []
    family = FAMILIES.get(names[0]) if names else None
    # transformers 5 writes rope_parameters; earlier files have rope_theta and rope_scaling.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    supported = (
        family is not None
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("use_sliding_window")
        and "sliding_attention" not in (config.get("layer_types") or [])
        and rope["rope_type"] in ROPE_KINDS
        and "quantization_config" not in config
        and float(config.get("attention_dropout") or 0.0) == 0.0
    )
    if not supported:
        return None
    assert family is not None
    heads = int(config["num_attention_heads"])
    attention_bias = bool(config.get("attention_bias", False))
    return Architecture(
        family=family,
        vocab=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or _default_head_dim(family, config)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        positions_max=int(config.get("max_position_embeddings", 1 << 30)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope=tuple(sorted((k, v) for k, v in rope.items() if not isinstance(v, list))),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family.startswith("qwen3"),
        **_expert_fields(family, config),
    )


def _default_head_dim(family: str, config: Mapping[str, Any]) -> int:
    # Qwen3's config class defaults to 128 where the file is silent; the others divide.
    if family == "qwen3":
        return 128
    return int(config["hidden_size"]) // int(config["num_attention_heads"])


def _expert_fields(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if family != "qwen3_moe":
        return {}
    return {
        "num_experts": int(config.get("num_experts") or config.get("num_local_experts") or 128),
        "experts_per_token": int(config.get("num_experts_per_tok", 8)),
        "expert_intermediate": int(config.get("moe_intermediate_size", 768)),
        "norm_topk": bool(config.get("norm_topk_prob", False)),
        "sparse_step": int(config.get("decoder_sparse_step", 1)),
        "dense_layers": tuple(config.get("mlp_only_layers") or ()),
    }
