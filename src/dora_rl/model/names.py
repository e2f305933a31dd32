"""The tensors of a model and of an adapter by their names in a checkpoint: what each must be, and
where it goes in packed parameters.

Never imports torch, so that a model directory is checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dora_rl.model.spec import ModelSpec
from dora_rl.types import UserError

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_LAYERS = (*ATTENTION_LAYERS, "gate_proj", "up_proj", "down_proj")  # may have an adapter
PREFIX = "base_model.model."  # peft's, before a name of the checkpoint
SCALE = "lora_scale"  # in a published adapter: alpha / rank, as a tensor of one number


@dataclass(frozen=True, slots=True)
class Target:
    """Where a named tensor goes: rows [start, start + shape[0]) of a packed parameter."""

    param: str
    start: int
    shape: tuple[int, ...]
    expert: int = -1
    full: bool = False  # the tensor is the whole packed parameter
    repeat: int = 0  # the tensor fills this many rows (one norm shared by all heads)


def targets_of(spec: ModelSpec) -> dict[str, Target]:
    """Hugging Face name -> place in the packed parameters."""
    targets = {
        "model.embed_tokens.weight": Target("embed", 0, (spec.vocab, spec.hidden)),
        "model.norm.weight": Target("norm", 0, (spec.hidden,)),
    }
    if not spec.tied:
        targets["lm_head.weight"] = Target("lm_head", 0, (spec.vocab, spec.hidden))
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        layer = _attention_targets(spec, str(i)) | _mlp_targets(spec, i)
        targets |= {prefix + name: target for name, target in layer.items()}
    return targets


def _attention_targets(spec: ModelSpec, i: str) -> dict[str, Target]:
    d, width = spec.hidden, spec.head_dim
    rows = {"q": spec.num_heads * width, "k": spec.num_kv_heads * width}
    rows["v"] = rows["k"]
    starts = {"q": 0, "k": rows["q"], "v": rows["q"] + rows["k"]}
    out = {
        "input_layernorm.weight": Target(f"{i}.norm1", 0, (d,)),
        "post_attention_layernorm.weight": Target(f"{i}.norm2", 0, (d,)),
        "self_attn.o_proj.weight": Target(f"{i}.o", 0, (d, rows["q"])),
    }
    for part in "qkv":
        name = f"self_attn.{part}_proj"
        out[f"{name}.weight"] = Target(f"{i}.qkv", starts[part], (rows[part], d))
        if spec.qkv_bias:
            out[f"{name}.bias"] = Target(f"{i}.qkv_bias", starts[part], (rows[part],))
    if spec.o_bias:
        out["self_attn.o_proj.bias"] = Target(f"{i}.o_bias", 0, (d,))
    if spec.qk_norm:
        out["self_attn.q_norm.weight"] = Target(f"{i}.qk_norm", 0, (width,), repeat=spec.num_heads)
        out["self_attn.k_norm.weight"] = Target(
            f"{i}.qk_norm", spec.num_heads, (width,), repeat=spec.num_kv_heads
        )
    return out


def _mlp_targets(spec: ModelSpec, i: int) -> dict[str, Target]:
    d, moe = spec.hidden, spec.moe
    if moe is None or not spec.is_sparse(i):
        return _dense_mlp_targets(spec, i)
    inner = moe.intermediate
    out = {
        "mlp.gate.weight": Target(f"{i}.router", 0, (moe.num_experts, d)),
        "mlp.experts.gate_up_proj": Target(
            f"{i}.gate_up", 0, (moe.num_experts, 2 * inner, d), full=True
        ),
        "mlp.experts.down_proj": Target(f"{i}.down", 0, (moe.num_experts, d, inner), full=True),
    }
    for e in range(moe.num_experts):
        name = f"mlp.experts.{e}"
        out[f"{name}.gate_proj.weight"] = Target(f"{i}.gate_up", 0, (inner, d), e)
        out[f"{name}.up_proj.weight"] = Target(f"{i}.gate_up", inner, (inner, d), e)
        out[f"{name}.down_proj.weight"] = Target(f"{i}.down", 0, (d, inner), e)
    return out


def _dense_mlp_targets(spec: ModelSpec, i: int) -> dict[str, Target]:
    d, inner = spec.hidden, spec.intermediate
    out = {
        "mlp.gate_proj.weight": Target(f"{i}.gate_up", 0, (inner, d)),
        "mlp.up_proj.weight": Target(f"{i}.gate_up", inner, (inner, d)),
        "mlp.down_proj.weight": Target(f"{i}.down", 0, (d, inner)),
    }
    if spec.mlp_bias:
        out["mlp.gate_proj.bias"] = Target(f"{i}.gate_up_bias", 0, (inner,))
        out["mlp.up_proj.bias"] = Target(f"{i}.gate_up_bias", inner, (inner,))
        out["mlp.down_proj.bias"] = Target(f"{i}.down_bias", 0, (d,))
    return out


def by_layer(
    spec: ModelSpec, targets: dict[str, Target], names: Collection[str], where: str
) -> dict[str, list[str]]:
    """The tensors to load, grouped by layer; a foreign or missing one is refused."""
    groups: dict[str, list[str]] = {}
    filled: set[tuple[str, int, int]] = set()
    for name in names:
        target = targets.get(name)
        if target is None:
            if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                continue  # a tied head saved all the same
            raise UserError(f"{where}: tensor {name} does not belong to a {spec.family}")
        filled.add((target.param, -1 if target.full else target.expert, target.start))
        groups.setdefault(target.param.split(".")[0], []).append(name)
    missing = [
        name
        for name, target in targets.items()
        if not target.full
        and (target.param, target.expert, target.start) not in filled
        and (target.expert < 0 or (target.param, -1, 0) not in filled)
    ]
    if missing:
        raise UserError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return {group: sorted(groups[group]) for group in sorted(groups, key=_layer_order)}


def check_shape(target: Target, name: str, shape: tuple[int, ...], where: str) -> None:
    if shape != target.shape:
        raise UserError(f"{where}: {name} has shape {shape}, config.json says {target.shape}")


def _layer_order(group: str) -> tuple[int, int]:
    return (1, int(group)) if group.isdigit() else (0 if group == "embed" else 2, 0)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a linear layer of the checkpoint stands: part `part` of `param`, rows from `start`."""

    param: str
    part: int
    start: int
    rows: int
    width: int


def places_of(spec: ModelSpec) -> dict[str, Place]:
    """Every linear layer that may have an adapter, by its name in the checkpoint."""
    places: dict[str, Place] = {}
    d, width = spec.hidden, spec.head_dim
    q, kv = spec.num_heads * width, spec.num_kv_heads * width
    for i in range(spec.num_layers):
        at = f"model.layers.{i}.self_attn."
        places[f"{at}q_proj"] = Place(f"{i}.qkv", 0, 0, q, d)
        places[f"{at}k_proj"] = Place(f"{i}.qkv", 1, q, kv, d)
        places[f"{at}v_proj"] = Place(f"{i}.qkv", 2, q + kv, kv, d)
        places[f"{at}o_proj"] = Place(f"{i}.o", 0, 0, d, q)
        if spec.is_sparse(i):
            continue
        at, inner = f"model.layers.{i}.mlp.", spec.intermediate
        places[f"{at}gate_proj"] = Place(f"{i}.gate_up", 0, 0, inner, d)
        places[f"{at}up_proj"] = Place(f"{i}.gate_up", 1, inner, inner, d)
        places[f"{at}down_proj"] = Place(f"{i}.down", 0, 0, d, inner)
    return places
