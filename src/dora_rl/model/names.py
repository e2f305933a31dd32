"""The tensors of a model and of an adapter by their names in a checkpoint: what each must be, and
where it goes in packed parameters.

Never imports torch, so that a model directory is checked before anything starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dora_rl.model.spec import ModelSpec
from dora_rl.types import UserError

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_LAYERS = (*ATTENTION_LAYERS, "gate_proj", "up_proj", "down_proj")  # may have an adapter
HEAD = "lm_head"  # the output matrix, by whatever name its weights are saved
PREFIX = "base_model.model."  # peft's, before a name of the checkpoint
SCALE = "lora_scale"  # in a published adapter: alpha / rank, as a tensor of one number


@dataclass(frozen=True, slots=True)
class Target:
    """Where a named tensor goes: `rows` rows from `start` on of a packed parameter."""

    param: str
    start: int
    shape: tuple[int, ...]
    expert: int = -1
    stacked: bool = False  # of all experts at once: a checkpoint has this, or one of each expert
    repeat: int = 0  # the tensor fills this many rows (one norm shared by all heads)

    @property
    def rows(self) -> int:
        return self.repeat or self.shape[0]


def targets_of(spec: ModelSpec) -> dict[str, Target]:
    """Hugging Face name -> place in the packed parameters."""
    embed, head = (Target(param, 0, (spec.vocab, spec.hidden)) for param in ("embed", "lm_head"))
    targets = {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": Target("norm", 0, (spec.hidden,)),
        **({} if spec.tied else {"lm_head.weight": head}),
    }
    for i in range(spec.num_layers):
        layer = _norm_targets(spec, i) | _matrix_targets(spec, i) | _expert_targets(spec, i)
        targets |= {f"model.layers.{i}.{name}": target for name, target in layer.items()}
    return targets


def _norm_targets(spec: ModelSpec, i: int) -> dict[str, Target]:
    out = {
        "input_layernorm.weight": Target(f"{i}.norm1", 0, (spec.hidden,)),
        "post_attention_layernorm.weight": Target(f"{i}.norm2", 0, (spec.hidden,)),
    }
    if spec.qk_norm:
        param, one, (q, k) = f"{i}.qk_norm", (spec.head_dim,), (spec.num_heads, spec.num_kv_heads)
        out["self_attn.q_norm.weight"] = Target(param, 0, one, repeat=q)
        out["self_attn.k_norm.weight"] = Target(param, q, one, repeat=k)
    return out


def _matrix_targets(spec: ModelSpec, i: int) -> dict[str, Target]:
    """The linear layers of attention and of a dense MLP, with their biases."""
    d, inner = spec.hidden, spec.intermediate
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = {  # name -> packed parameter, whether it has a bias, first row, shape
        "self_attn.q_proj": ("qkv", spec.qkv_bias, 0, (q, d)),
        "self_attn.k_proj": ("qkv", spec.qkv_bias, q, (kv, d)),
        "self_attn.v_proj": ("qkv", spec.qkv_bias, q + kv, (kv, d)),
        "self_attn.o_proj": ("o", spec.o_bias, 0, (d, q)),
    }
    mlp = {
        "mlp.gate_proj": ("gate_up", spec.mlp_bias, 0, (inner, d)),
        "mlp.up_proj": ("gate_up", spec.mlp_bias, inner, (inner, d)),
        "mlp.down_proj": ("down", spec.mlp_bias, 0, (d, inner)),
    }
    out: dict[str, Target] = {}
    for name, (param, bias, start, shape) in (
        attention | ({} if spec.is_sparse(i) else mlp)
    ).items():
        out[f"{name}.weight"] = Target(f"{i}.{param}", start, shape)
        if bias:
            out[f"{name}.bias"] = Target(f"{i}.{param}_bias", start, shape[:1])
    return out


def _expert_targets(spec: ModelSpec, i: int) -> dict[str, Target]:
    d, moe = spec.hidden, spec.moe
    if moe is None or not spec.is_sparse(i):
        return {}
    count, inner, gate_up, down = moe.num_experts, moe.intermediate, f"{i}.gate_up", f"{i}.down"
    out = {
        "mlp.gate.weight": Target(f"{i}.router", 0, (count, d)),
        "mlp.experts.gate_up_proj": Target(gate_up, 0, (count, 2 * inner, d), stacked=True),
        "mlp.experts.down_proj": Target(down, 0, (count, d, inner), stacked=True),
    }
    matrices = {
        "gate_proj": (gate_up, 0, (inner, d)),
        "up_proj": (gate_up, inner, (inner, d)),
        "down_proj": (down, 0, (d, inner)),
    }
    return out | {
        f"mlp.experts.{e}.{name}.weight": Target(*place, e)
        for e in range(count)
        for name, place in matrices.items()
    }


def packed_shapes(targets: Mapping[str, Target]) -> dict[str, tuple[int, ...]]:
    """Every packed parameter: as many rows as its tensors fill."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets.values():
        if target.expert < 0:
            columns = target.shape if target.repeat else target.shape[1:]
            whole = (target.start + target.rows, *columns)
            shapes[target.param] = max(whole, shapes.get(target.param, whole))
    return shapes


def by_layer(
    spec: ModelSpec, targets: Mapping[str, Target], names: Collection[str], where: str
) -> dict[str, list[str]]:
    """The tensors to load, grouped by layer; a foreign or missing one is refused."""
    groups: dict[str, list[str]] = {}
    filled: set[tuple[str, int, int]] = set()
    for name in names:
        if (target := targets.get(name)) is None:
            if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                continue  # a tied head saved all the same
            raise UserError(f"{where}: tensor {name} does not belong to a {spec.family}")
        filled.add((target.param, target.expert, target.start))
        groups.setdefault(target.param.split(".")[0], []).append(name)
    missing = [
        name
        for name, target in targets.items()
        if not target.stacked
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
    num_parts: Counter[str] = Counter()
    for name, target in targets_of(spec).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.endswith(LINEAR_LAYERS) and target.expert < 0:
            part, (rows, width) = num_parts[target.param], target.shape
            places[module] = Place(target.param, part, target.start, rows, width)
            num_parts[target.param] += 1
    return places
