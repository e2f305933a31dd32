"""A small random model with the switches of a large one: what it computes, at a thousandth.

Cuts numbers of layers, heads, experts and tokens and the lengths of windows in a config of
transformers; never touches what says how something is computed. Invariant: the clone is a model of
the same class, and every kind of layer that its config lists is in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from dora_rl.types import UserError

WINDOW = 8  # of the clone: documents longer than this leave it
FILE_BYTES_SMALL = 80 << 20  # a model with weights up to this size is cloned as wide as it is
PARAMS_MAX = 250_000_000
VOCAB_MAX = 512
WIDTH_MIN, WIDTH_MAX, WIDTH_UNIT = 32, 64, 16

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads")
_PARTS = (
    "num_key_value_heads",
    "num_kv_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_MLPS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# What says in which layer something first appears.
_FIRST_AT = ("first_k_dense_replace", "attn_layer_offset", "expert_layer_offset")
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "attention_window_size",
    "window_size",
)
# What the code of a model raises for them.
_SIZES_THAT_DO_NOT_FIT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def make_clone(config: Any, file_bytes: int, trust: bool) -> Any:
    """The smallest clone that can be built, in float32 on the CPU, with strong random weights."""
    last: Exception | None = None
    for data in _smaller(config.to_dict(), small=file_bytes <= FILE_BYTES_SMALL):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in _build(config, data, trust).parameters())
            if size > PARAMS_MAX:
                raise ValueError(f"{size:,} parameters")
            model = _build(config, data, trust)
            _randomise(model)
            with torch.no_grad():
                model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        except _SIZES_THAT_DO_NOT_FIT as error:  # the next ones may
            last = error
        else:
            return model
    line = next(iter(str(last).strip().splitlines()), type(last).__name__)
    raise UserError(f"no small clone of it can be built to check it with ({line})")


def _build(config: Any, data: dict[str, Any], trust: bool) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        type(config).from_dict(data),
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=trust,
    ).eval()


def _smaller(config: dict[str, Any], small: bool) -> Iterator[dict[str, Any]]:
    """Configs to try, the smallest first."""
    if small:
        yield _narrow_windows(config)
        return
    for factor in _factors(config.get("text_config") or config):
        for cut_rest in (True, False):
            yield _shrink(config, factor, cut_rest)


def _factors(config: dict[str, Any]) -> list[int]:
    """By how much it may be narrower: widths stay what kernels ask of them and two heads or more
    are left, if that can be."""
    heads = [config[k] for k in _HEADS if isinstance(config.get(k), int)]
    widths = [config[k] for k in _WIDTHS if isinstance(config.get(k), int)]
    common = math.gcd(*heads, *widths)
    limit = min(widths, default=1) // WIDTH_MIN

    def trouble(factor: int) -> tuple[bool, bool, int]:
        odd = any(width // factor % WIDTH_UNIT for width in widths)
        return odd, min(heads, default=factor) < 2 * factor, -factor

    factors = [f for f in range(min(common, limit), 1, -1) if common % f == 0]
    return [*sorted(factors, key=trouble)[:4], 1]


def _narrow_windows(config: dict[str, Any]) -> dict[str, Any]:
    made = dict(config)
    for key in _WINDOWS:
        if isinstance(made.get(key), int):
            made[key] = min(made[key], WINDOW)
    if isinstance(made.get("text_config"), dict):
        made["text_config"] = _narrow_windows(made["text_config"])
    return made


def _shrink(config: dict[str, Any], factor: int, cut_rest: bool) -> dict[str, Any]:
    """Everything `factor` times narrower; with `cut_rest` small MLPs, few experts and few tokens
    as well."""
    made = _narrow_windows(config)
    if isinstance(made.get("text_config"), dict):
        return {**made, "text_config": _shrink(made["text_config"], factor, cut_rest)}
    for key in (*_WIDTHS, *_HEADS, *_PARTS):
        if isinstance(made.get(key), int):
            made[key] = max(1, made[key] // factor)
    _cut_layers(made)
    if cut_rest:
        _cut_rest(made)
    return made


def _cut_layers(made: dict[str, Any]) -> None:
    count = next((made[k] for k in _LAYERS if isinstance(made.get(k), int)), 0)
    first = [made[k] + 1 for k in _FIRST_AT if isinstance(made.get(k), int)]
    keep = min(count, max(4, *first, 0))
    for key, value in made.items():
        if key in _LAYERS and isinstance(value, int):
            made[key] = keep
        elif isinstance(value, list) and len(value) == count:
            made[key] = _prefix(value, keep)
        elif isinstance(value, list) and key.endswith("layer_indices"):
            made[key] = [i for i in value if i < keep] or [keep - 1]


def _prefix(values: list[Any], keep: int) -> list[Any]:
    """The first ones; kinds that come later only are put at the end."""
    head = values[:keep]
    kinds = [v for i, v in enumerate(values) if isinstance(v, str) and v not in values[:i]]
    missing = [v for v in kinds if v not in head]
    return [*head[: keep - len(missing)], *missing]


def _cut_rest(made: dict[str, Any]) -> None:
    for key in _MLPS:
        if isinstance(made.get(key), int):
            made[key] = min(made[key], WIDTH_MAX)
    chosen = max([v for k, v in made.items() if "per_tok" in k and isinstance(v, int)], default=2)
    groups = made.get("n_group") or 1
    for key in _EXPERTS:
        if isinstance(made.get(key), int):
            few = math.ceil(max(8, 2 * chosen, 2 * groups) / groups) * groups
            made[key] = min(made[key], few)
    made["vocab_size"] = min(made.get("vocab_size") or VOCAB_MAX, VOCAB_MAX)
    for key, value in made.items():
        if key.endswith("token_id") and isinstance(value, int):
            made[key] = min(value, made["vocab_size"] - 1)


@torch.no_grad()
def _randomise(model: Any) -> None:
    """Weights under which everything matters: attention is sharp, no bias is zero."""
    kept = model.state_dict().keys()
    buffers = [b for n, b in model.named_buffers() if n in kept and b.is_floating_point()]
    for tensor in (*model.parameters(), *buffers):
        if tensor.dim() > 1:
            tensor.normal_(0.0, 1.5 / math.sqrt(tensor.shape[-1]))
        else:
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
