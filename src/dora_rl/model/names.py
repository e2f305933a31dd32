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
FUSED_LAYERS = ("qkv_proj", "gate_up_proj")  # too, where a family has them in place of the others
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
    offset: float = 0.0  # added to it; such parameters stay in float32
    turned: int = 0  # its first so many heads are rotated (see `rope.head_order`)

    @property
    def rows(self) -> int:
        return self.repeat or self.shape[0]


def targets_of(spec: ModelSpec) -> dict[str, Target]:
    """Hugging Face name -> place in the packed parameters."""
    embed, head = (Target(param, 0, (spec.vocab, spec.hidden)) for param in ("embed", "lm_head"))
    targets = {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": Target("norm", 0, (spec.hidden,), offset=spec.norm_offset),
        **({} if spec.tied else {"lm_head.weight": head}),
    }
    for i in range(spec.num_layers):
        layer = _norm_targets(spec, i) | _matrix_targets(spec, i) | _expert_targets(spec, i)
        targets |= {f"model.layers.{i}.{name}": target for name, target in layer.items()}
    return targets


NORMS = ("norm1", "post1", "norm2", "post2")  # packed parameters, as `ModelSpec.norms` orders them


def _norm_targets(spec: ModelSpec, i: int) -> dict[str, Target]:
    offset = spec.norm_offset
    out = {
        f"{name}.weight": Target(f"{i}.{param}", 0, (spec.hidden,), offset=offset)
        for name, param in zip(spec.norms, NORMS, strict=True)
        if name
    }
    if spec.qk_norm:
        param, whole, start = f"{i}.qk_norm", spec.qk_norm_whole, 0
        for name, heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)):
            num, repeat = (heads, 0) if whole else (1, heads)  # norms in the tensor, and after it
            shape = (num * spec.head_dim,)
            target = Target(param, start, shape, offset=offset, repeat=repeat, turned=num)
            out[f"self_attn.{name}.weight"] = target
            start += target.rows
    return out


def _matrix_targets(spec: ModelSpec, i: int) -> dict[str, Target]:
    """The linear layers of attention and of a dense MLP, with their biases."""
    attention, mlp = _attention_places(spec), {} if spec.is_sparse(i) else _mlp_places(spec)
    out: dict[str, Target] = {}
    for name, (param, bias, start, shape, turned) in (attention | mlp).items():
        out[f"{name}.weight"] = Target(f"{i}.{param}", start, shape, turned=turned)
        if bias:
            out[f"{name}.bias"] = Target(f"{i}.{param}_bias", start, shape[:1], turned=turned)
    return out


# Of a linear layer: packed parameter, whether it has a bias, first row, shape, heads to rotate.
_Places = dict[str, tuple[str, bool, int, tuple[int, int], int]]


def _attention_places(spec: ModelSpec) -> _Places:
    d, heads, kv_heads = spec.hidden, spec.num_heads, spec.num_kv_heads
    q, kv, bias = heads * spec.head_dim, kv_heads * spec.head_dim, spec.qkv_bias
    places: _Places = {
        "self_attn.q_proj": ("qkv", bias, 0, (q, d), heads),
        "self_attn.k_proj": ("qkv", bias, q, (kv, d), kv_heads),
        "self_attn.v_proj": ("qkv", bias, q + kv, (kv, d), 0),
    }
    if spec.fused_qkv:
        places = {"self_attn.qkv_proj": ("qkv", bias, 0, (q + 2 * kv, d), heads + kv_heads)}
    return places | {"self_attn.o_proj": ("o", spec.o_bias, 0, (d, q), 0)}


def _mlp_places(spec: ModelSpec) -> _Places:
    d, inner, bias = spec.hidden, spec.intermediate, spec.mlp_bias
    places: _Places = {
        "mlp.gate_proj": ("gate_up", bias, 0, (inner, d), 0),
        "mlp.up_proj": ("gate_up", bias, inner, (inner, d), 0),
    }
    if spec.fused_gate_up:
        places = {"mlp.gate_up_proj": ("gate_up", bias, 0, (2 * inner, d), 0)}
    return places | {"mlp.down_proj": ("down", bias, 0, (d, inner), 0)}


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
    turned: int = 0  # heads that are rotated, as of a `Target`


def places_of(spec: ModelSpec) -> dict[str, Place]:
    """Every linear layer that may have an adapter, by its name in the checkpoint."""
    places: dict[str, Place] = {}
    num_parts: Counter[str] = Counter()
    for name, target in targets_of(spec).items():
        module, _, kind = name.rpartition(".")
        last = module.rpartition(".")[2]
        known = last in (*LINEAR_LAYERS, *FUSED_LAYERS)
        if kind == "weight" and known and target.expert < 0:
            part, (rows, width) = num_parts[target.param], target.shape
            places[module] = Place(target.param, part, target.start, rows, width, target.turned)
            num_parts[target.param] += 1
    return places
