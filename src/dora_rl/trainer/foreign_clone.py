"""A small random model with the switches of a large one: what it computes, at a thousandth.

Cuts numbers of layers, heads, experts and tokens and the lengths of windows in a config of
transformers; never touches what says how something is computed. Invariant: the clone is a model of
the same class, and every kind of layer that its config lists is in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dora_rl.types import UserError

WINDOW = 8  # of the clone: documents longer than this leave it
FILE_BYTES_SMALL = 80 << 20  # a model with weights up to this size is cloned as wide as it is
VOCAB_MAX = 512
WIDTH_MAX = 64

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_MLPS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size")


def make_clone(config: Any, directory: Path, trust: bool) -> Any:
    """The smallest clone that can be built, in float32 on the CPU, with strong random weights."""
    from transformers import AutoModelForCausalLM

    sizes = [f.stat().st_size for f in directory.glob("*.safetensors")]
    last: Exception | None = None
    for data in _smaller(config.to_dict(), small=sum(sizes) <= FILE_BYTES_SMALL):
        try:
            model: Any = AutoModelForCausalLM.from_config(
                type(config).from_dict(data),
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=trust,
            ).eval()
            _randomise(model)
            with torch.no_grad():
                model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        except Exception as error:  # sizes that do not go together; the next ones may
            last = error
        else:
            return model
    line = next(iter(str(last).strip().splitlines()), type(last).__name__)
    raise UserError(f"no small clone of it can be built to check it with ({line})")


def _smaller(config: dict[str, Any], small: bool) -> Iterator[dict[str, Any]]:
    """Configs to try, the smallest first."""
    if not small:
        for factor in (16, 8, 4, 2, 1):
            for cut_rest in (True, False):
                made = _shrink(config, factor, cut_rest)
                if made is not None:
                    yield made
    else:
        yield _narrow_windows(config)


def _narrow_windows(config: dict[str, Any]) -> dict[str, Any]:
    made = dict(config)
    for key in _WINDOWS:
        if isinstance(made.get(key), int):
            made[key] = min(made[key], WINDOW)
    if isinstance(made.get("text_config"), dict):
        made["text_config"] = _narrow_windows(made["text_config"])
    return made


def _shrink(config: dict[str, Any], factor: int, cut_rest: bool) -> dict[str, Any] | None:
    """Everything `factor` times narrower, or None if something does not divide; with `cut_rest`
    small MLPs, few experts and few tokens as well."""
    made = _narrow_windows(config)
    if isinstance(made.get("text_config"), dict):
        inner = _shrink(made["text_config"], factor, cut_rest)
        return None if inner is None else {**made, "text_config": inner}
    for key in (*_WIDTHS, *_HEADS):
        if isinstance(made.get(key), int):
            if made[key] % factor:
                return None
            made[key] //= factor
    for key in _KV_HEADS:
        if isinstance(made.get(key), int):
            made[key] = max(1, made[key] // factor)
    _cut_layers(made, 12 if factor > 1 else 4)
    if cut_rest:
        _cut_rest(made)
    return made


def _cut_layers(made: dict[str, Any], num_max: int) -> None:
    count = next((made[k] for k in _LAYERS if isinstance(made.get(k), int)), 0)
    keep = min(count, num_max)
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
