"""The shape of a model, read from a Hugging Face `config.json`. Pure: no torch.

Where the file is silent, transformers' own defaults hold. Invariant: a `ModelSpec` says everything
that engine and learner need to allocate and run a model; two engines with equal specs can exchange
KV blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dora_rl.types import UserError


class NotSupported(UserError):
    """A model of a kind that neither the engine nor the packed decoder computes."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base frequency and the scaling rule, if any.

    `kind` is `default`, `linear`, `llama3`, `yarn`, `longrope` or `none` (nothing is turned);
    `share` is how much of a head is rotated, from its beginning, and `interleaved` says that pairs
    are neighbours, not half of that apart. The other fields have the meaning they have in a Hugging
    Face config.
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
    short_factors: tuple[float, ...] = ()
    share: float = 1.0
    interleaved: bool = False

    def width(self, head_dim: int) -> int:
        """Numbers of a head that are rotated."""
        return int(head_dim * self.share)


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


NO_ROPE = RopeSpec(kind="none")
# The norms of a block by their names in a checkpoint: before attention, of what attention adds,
# before the MLP, of what the MLP adds. "": there is none.
PRE_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")


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
    qk_norm_whole: bool = False  # over all heads of a row at once, not over each
    fused_qkv: bool = False  # a checkpoint has one matrix `qkv_proj`, which is one linear layer
    fused_gate_up: bool = False  # likewise `gate_up_proj`
    moe: MoeSpec | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    ropes: tuple[RopeSpec, ...] = ()  # by layer, where they differ
    windows: tuple[int, ...] = ()  # by layer: tokens that a query sees, its own included; 0: all
    norms: tuple[str, str, str, str] = PRE_NORMS
    norm_offset: float = 0.0  # added to every norm's weight
    activation: str = "silu"  # of the MLP's gate, or "gelu_tanh"
    embed_scale: float = 1.0  # of what a token enters with
    query_scale: float = 0.0  # of query times key; 0: head_dim^-1/2

    @property
    def scale(self) -> float:
        """Of query times key."""
        return self.query_scale or self.head_dim**-0.5

    def rope_of(self, layer: int) -> RopeSpec:
        return self.ropes[layer] if self.ropes else self.rope

    def all_ropes(self) -> tuple[RopeSpec, ...]:
        """Each that some layer has, once."""
        return tuple(dict.fromkeys(self.ropes)) or (self.rope,)

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

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
        attention = width * sum(
            6.0 * _pairs(n, self.window_of(i)) for i in range(self.num_layers) for n in lengths
        )
        per_token = 4.0 * matrices + 6.0 * adapter_params if adapter_params else 6.0 * matrices
        return per_token * sum(lengths) + attention


def _pairs(length: int, window: int) -> int:
    """Twice the (query, key) pairs of a document, a query with itself counted half."""
    beyond = max(0, length - window) if window else 0
    return length * length - beyond * beyond


def read_windows(
    config: Mapping[str, Any], default: Sequence[str], window: int | None, where: str
) -> tuple[int, ...]:
    """What each layer sees, by `layer_types`, or `default` where the file has none."""
    types = list(config.get("layer_types") or default)[: int(config.get("num_hidden_layers", 0))]
    if other := sorted({*types} - {"full_attention", "sliding_attention"}):
        raise NotSupported(f"{where}: attention of the type {other[0]!r} is not supported")
    if "sliding_attention" not in types:
        return ()
    if not window or len(types) < int(config["num_hidden_layers"]):
        raise UserError(f"{where}: layer_types do not fit num_hidden_layers and sliding_window")
    return tuple(int(window) if kind == "sliding_attention" else 0 for kind in types)


def read_rope(
    config: Mapping[str, Any],
    trained: int,
    where: str,
    theta: float = 10_000.0,
    share: float | None = None,
) -> RopeSpec:
    """RoPE settings from either spelling: `rope_parameters`, or `rope_theta` + `rope_scaling`.
    `theta`, `share`: where the file is silent. A family without `share` rotates whole heads."""
    merged = {"rope_theta": config.get("rope_theta") or theta}
    if share is not None:
        given = config.get("partial_rotary_factor", share)
        merged["partial_rotary_factor"] = 1.0 if given is None else given
    merged |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind == "dynamic":
        raise NotSupported(
            f"{where}: rope type 'dynamic' changes old keys as a text grows, which a KV cache "
            "cannot follow"
        )
    if kind not in ("default", "linear", "llama3", "yarn", "longrope"):
        raise NotSupported(
            f"{where}: unknown rope type {kind!r}; known: default, linear, llama3, yarn, longrope"
        )
    if config.get("rope_theta") == 0 or not merged["rope_theta"] > 0:
        raise UserError(f"{where}: rope_theta must be above 0")
    original = (
        config.get("original_max_position_embeddings")
        or merged.get("original_max_position_embeddings")
        or trained
    )
    longer = trained / original if kind == "yarn" else 1.0  # what a factor of null stands for
    rope = RopeSpec(
        theta=float(merged["rope_theta"]),
        kind=kind,
        factor=float(merged.get("factor") or longer),
        context_original=int(original),
        low_freq_factor=float(merged.get("low_freq_factor") or 1.0),
        high_freq_factor=float(merged.get("high_freq_factor") or 4.0),
        beta_fast=float(merged.get("beta_fast") or 32.0),
        beta_slow=float(merged.get("beta_slow") or 1.0),
        attention_factor=merged.get("attention_factor"),
        mscale=float(merged.get("mscale") or 0.0),
        mscale_all_dim=float(merged.get("mscale_all_dim") or 0.0),
        truncate=bool(merged.get("truncate", True)),
        share=1.0 if share is None else float(merged["partial_rotary_factor"]),
    )
    return rope if kind != "longrope" else _longrope(rope, merged, trained, where)


def _longrope(rope: RopeSpec, merged: Mapping[str, Any], trained: int, where: str) -> RopeSpec:
    """The factors of texts as long as those of the pre-training."""
    if not (short := merged.get("short_factor")):
        raise UserError(f"{where}: rope type 'longrope' without short_factor")
    factor = float(merged.get("factor") or trained / rope.context_original)
    return replace(rope, factor=factor, short_factors=tuple(short))


def rope_of_type(config: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """The config as layers of the type `kind` have it, where the types' rotary positions differ:
    `rope_scaling` is that of layers that see all."""
    own = (config.get("rope_parameters") or {}).get(kind) or {}
    if kind == "full_attention" and (scaling := config.get("rope_scaling")):
        if "rope_type" not in scaling:
            raise NotSupported(f"{where}: rope_scaling needs rope_type; others pass 'type' over")
        own = {**own, **scaling}
    trained = "original_max_position_embeddings"
    first = {trained: own.get(trained) or config.get(trained)}
    return {**config, **first, "rope_parameters": own, "rope_scaling": None}


def dense_spec(
    config: Mapping[str, Any],
    family: str,
    where: str,
    *,
    head_dim: int = 0,
    context: int = 2048,
    theta: float = 10_000.0,
    **own: Any,
) -> ModelSpec:
    """The fields every family shares. Where the file is silent, a head has `head_dim` numbers (0:
    hidden size over heads), a text `context` tokens and rotary positions the base `theta`. `own`
    are further fields of the family, which may replace any."""
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    if missing := [key for key in needed if key not in config]:
        raise UserError(f"{where}: config.json lacks {', '.join(missing)}")
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    hidden = int(config["hidden_size"])
    if num_heads % num_kv_heads:
        raise UserError(f"{where}: {num_heads} heads cannot share {num_kv_heads} key-value heads")
    if "activation" not in own and config.get("hidden_act", "silu") != "silu":
        raise NotSupported(f"{where}: hidden_act {config['hidden_act']!r}; the engine knows silu")
    asked = config.get("use_sliding_window") or "sliding_attention" in (
        config.get("layer_types") or ()
    )
    if "windows" not in own and asked:
        raise NotSupported(f"{where}: sliding-window attention is not supported in this family")
    context_max = int(config.get("max_position_embeddings") or context)
    rope = own.pop("rope", None) or read_rope(config, context_max, where, theta)
    head_dim = int(config.get("head_dim") or head_dim or hidden // num_heads)
    if (width := rope.width(head_dim)) % 2 or head_dim % 2 or width > head_dim:
        raise NotSupported(f"{where}: {width} of a head's {head_dim} numbers cannot be rotated")
    if (factors := len(rope.short_factors)) not in (0, width // 2):
        raise UserError(f"{where}: short_factor has {factors} numbers, not {width // 2}")
    if rope.kind == "longrope":  # a longer text would have other factors, its first tokens too
        context_max = min(context_max, rope.context_original)
    fields: dict[str, Any] = {
        "family": family,
        "vocab": int(config["vocab_size"]),
        "hidden": hidden,
        "intermediate": int(config.get("intermediate_size") or 0),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "context_max": context_max,
        "rope": rope,
        "eos_ids": eos_ids_of(config),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    }
    return ModelSpec(**fields | own)


def eos_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of a config of any architecture."""
    eos = config.get("eos_token_id")
    return tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
