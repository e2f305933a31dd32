"""The shape of a model, read from a Hugging Face `config.json`. Pure: no torch.

Where the file is silent, transformers' own defaults hold. Invariant: a `ModelSpec` says everything
that engine and learner need to allocate and run a model; two engines with equal specs can exchange
KV blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dora_rl.types import UserError


class NotSupported(UserError):
    """A model of a kind that neither the engine nor the packed decoder computes."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base frequency and the scaling rule, if any.

    `kind` is `default`, `linear`, `llama3` or `yarn`; the other fields have the meaning they have
    in a Hugging Face config.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    context_original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Sparse layers: `num_experts` of width `intermediate`, `top_k` of them for each token."""

    num_experts: int
    top_k: int
    intermediate: int
    normalise: bool
    sparse_layers: tuple[int, ...]

    @property
    def routing_dtype(self) -> str:
        """Of recorded choices: the smallest integers with a number for each expert and one, the
        largest there is, for "not recorded"."""
        return "uint8" if self.num_experts < 256 else "int16"

    @property
    def routing_token_bytes(self) -> int:
        """The recorded choices of one token over all sparse layers."""
        return len(self.sparse_layers) * self.top_k * (1 if self.routing_dtype == "uint8" else 2)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only transformer of a known family."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    tied: bool
    context_max: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoeSpec | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    @property
    def num_groups(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def kv_token_bytes(self, item_bytes: int, routing: bool = False) -> int:
        """Keys and values of one token over all layers; with the record of its experts."""
        recorded = self.moe.routing_token_bytes if routing and self.moe is not None else 0
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item_bytes + recorded

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.sparse_layers

    def layer_params_active(self) -> int:
        """Matrix parameters that one token meets in one block."""
        attention = 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        inner = self.moe.intermediate * self.moe.top_k if self.moe else self.intermediate
        return attention + 3 * self.hidden * inner

    def train_flops(self, lengths: Sequence[int], adapter_params: int = 0) -> float:
        """Model FLOPs of forward and backward over documents: 6 per parameter and token (the
        output matrix counted, the embedding lookup not), 6·n·width per token for causal
        attention; no recomputation is counted. Where adapters are trained, 4 per frozen parameter:
        it has no gradient of its own."""
        matrices = self.num_layers * self.layer_params_active() + self.vocab * self.hidden
        width = self.num_heads * self.head_dim
        attention = self.num_layers * width * sum(6.0 * n * n for n in lengths)
        per_token = 4.0 * matrices + 6.0 * adapter_params if adapter_params else 6.0 * matrices
        return per_token * sum(lengths) + attention


def read_rope(config: Mapping[str, Any], trained: int, where: str) -> RopeSpec:
    """RoPE settings from either spelling: `rope_parameters`, or `rope_theta` + `rope_scaling`."""
    merged = {"rope_theta": config.get("rope_theta", 10_000.0)}
    merged |= config.get("rope_scaling") or {}
    merged |= config.get("rope_parameters") or {}
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind == "dynamic":
        raise NotSupported(
            f"{where}: rope type 'dynamic' changes old keys as a text grows, which a KV cache "
            "cannot follow; use 'yarn', 'linear' or 'llama3'"
        )
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise NotSupported(
            f"{where}: unknown rope type {kind!r}; known: default, linear, llama3, yarn"
        )
    return RopeSpec(
        theta=float(merged["rope_theta"]),
        kind=kind,
        factor=float(merged.get("factor") or 1.0),
        context_original=int(
            merged.get("original_max_position_embeddings")
            or config.get("original_max_position_embeddings")
            or trained
        ),
        low_freq_factor=float(merged.get("low_freq_factor") or 1.0),
        high_freq_factor=float(merged.get("high_freq_factor") or 4.0),
        beta_fast=float(merged.get("beta_fast") or 32.0),
        beta_slow=float(merged.get("beta_slow") or 1.0),
        attention_factor=merged.get("attention_factor"),
        mscale=float(merged.get("mscale") or 0.0),
        mscale_all_dim=float(merged.get("mscale_all_dim") or 0.0),
        truncate=bool(merged.get("truncate", True)),
    )


def dense_spec(
    config: Mapping[str, Any],
    family: str,
    where: str,
    *,
    head_dim: int = 0,
    context: int = 2048,
    **own: Any,
) -> ModelSpec:
    """The fields every family shares. Where the file is silent, a head has `head_dim` numbers (0:
    hidden size over heads) and a text `context` tokens. `own` are further fields of the family."""
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    if missing := [key for key in needed if key not in config]:
        raise UserError(f"{where}: config.json lacks {', '.join(missing)}")
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    hidden = int(config["hidden_size"])
    if num_heads % num_kv_heads:
        raise UserError(f"{where}: {num_heads} heads cannot share {num_kv_heads} key-value heads")
    if config.get("hidden_act", "silu") != "silu":
        raise NotSupported(f"{where}: hidden_act {config['hidden_act']!r}; the engine knows silu")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise NotSupported(f"{where}: sliding-window attention is not supported; set it off")
    context_max = int(config.get("max_position_embeddings") or context)
    return ModelSpec(
        family=family,
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        intermediate=int(config.get("intermediate_size") or 0),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(config.get("head_dim") or head_dim or hidden // num_heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config, context_max, where),
        tied=bool(config.get("tie_word_embeddings", False)),
        context_max=context_max,
        eos_ids=eos_ids_of(config),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        **own,
    )


def eos_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of a config of any architecture."""
    eos = config.get("eos_token_id")
    return tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
