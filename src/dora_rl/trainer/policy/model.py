"""From a Hugging Face directory to a policy the learner can run, and back to named tensors.

`Policy` is what the learner holds: the lean `Decoder`, or `ForeignPolicy`, which runs transformers'
own model for architectures the decoder does not know. Never trusts remote code unless told.
Invariant: `named_weights` yields exactly the tensors of the Hugging Face checkpoint, by its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dora_rl.config import TrainerConfig
from dora_rl.config.section import choose
from dora_rl.model.directory import HfDirectory, read_config
from dora_rl.model.families import spec_from_config
from dora_rl.model.spec import ModelSpec, NotSupported
from dora_rl.trainer.attention import Layout, pick_attention
from dora_rl.trainer.checks import checkpoints_layers
from dora_rl.trainer.distributed import gathered, like_shard, world
from dora_rl.trainer.foreign.policy import ForeignPolicy
from dora_rl.trainer.policy.decoder import Decoder, Layer, cast_parameters
from dora_rl.trainer.policy.lora import add_lora, checkpoint_name, is_adapter, merged
from dora_rl.user_code import require

Policy: TypeAlias = Decoder | ForeignPolicy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Each parameter of a layer's experts stands for matrices of the checkpoint, some for every expert.
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def pick_device(name: str) -> torch.device:
    """The device the user named, or the first GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    require(
        (
            not name.startswith("cuda") or torch.cuda.is_available(),
            f"trainer.device '{name}': this torch sees no GPU; use device = 'cpu'",
        )
    )
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, what: str = "trainer.compute_dtype") -> torch.dtype:
    """The dtype the user named, or the device's usual one."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    choose(what, name, (*DTYPES, "auto"))
    return DTYPES[name]


def build_decoder(
    arch: ModelSpec, options: TrainerConfig, weights_dtype: torch.dtype = torch.float32
) -> Decoder:
    """A lean decoder on the chosen device, its parameters not yet initialised."""
    device = pick_device(options.device)
    dtype = pick_dtype(options.compute_dtype, device)
    attend = pick_attention(options.attention, device, dtype)
    with torch.device("meta"):
        decoder = Decoder(arch, attend, dtype)
    cast_parameters(decoder, weights_dtype)  # before there is any memory behind them
    decoder.to_empty(device=device)
    decoder.set_frequencies(device)
    decoder.checkpointing = checkpoints_layers(options)
    decoder.chunk_tokens = options.logits_chunk_tokens
    decoder.replays = arch.moe is not None and options.router_replay != "off"
    decoder.router_aux_coef = options.router_aux_coef
    if choose("trainer.compile", options.compile, ("auto", "on", "off")) != "off" and (
        options.compile == "on" or device.type == "cuda"
    ):
        _compile_layers(decoder)
    return decoder


def _compile_layers(decoder: Decoder) -> None:
    """Fuse what lies around attention. All layers share one compiled body.

    What is fused rounds wherever the plain formulas do. Otherwise a weight that is cast where it is
    used would not be rounded at all, and values would depend on what autograd keeps: a frozen twin
    and the policy would not agree on the same weights.
    """
    for layer in decoder.model.layers:
        assert isinstance(layer, Layer)
        layer.fuse(dynamic=True, options={"emulate_precision_casts": True})
    decoder.compiled = True
    settings: Any = torch._dynamo.config
    # Otherwise the eps of a norm is an input that may change: a number on the CPU in every layer,
    # and half a minute for a C++ compiler at the start.
    settings.specialize_float = True
    # Beyond it torch runs them as they are, without a word: sizes × with and without gradients.
    settings.recompile_limit = max(settings.recompile_limit, 64)


def load_policy(directory: Path, options: TrainerConfig) -> Policy:
    """Read a model directory into a policy with float32 parameters. A base that only carries
    adapters stays as it is stored, where the policy computes in that."""
    config = read_config(directory)
    choose("trainer.implementation", options.implementation, ("auto", "lean", "transformers"))
    arch = None if options.implementation == "transformers" else lean_spec(config)
    require(
        (
            arch is not None or options.implementation != "lean",
            f"model '{directory}': the lean decoder does not know this architecture; "
            "use trainer.implementation = 'auto'",
        )
    )
    if arch is None:
        from dora_rl.trainer.foreign.check import load_foreign  # it imports transformers

        device = pick_device(options.device)
        return load_foreign(directory, device, pick_dtype(options.compute_dtype, device), options)
    decoder = build_decoder(arch, options, _weights_dtype(config, options))
    load_weights(decoder, HfDirectory(directory).tensor)
    return decoder


def lean_spec(config: Mapping[str, Any]) -> ModelSpec | None:
    """The lean decoder's shape, or None for any model that it does not reproduce exactly, which
    must run through transformers."""
    try:
        spec = spec_from_config(config)
    except NotSupported:
        return None
    # Runs of families that always had one kind of layers go on as they began, through transformers.
    lean = (spec.rope.kind != "yarn" or spec.ropes) and "quantization_config" not in config
    return spec if lean and not float(config.get("attention_dropout") or 0.0) else None


def _weights_dtype(config: dict[str, Any], options: TrainerConfig) -> torch.dtype:
    """Half the memory, and the same numbers wherever they go. Ranks shard one dtype alone."""
    computed = pick_dtype(options.compute_dtype, pick_device(options.device))
    stored = str(config.get("dtype") or config.get("torch_dtype"))
    alone = options.lora_rank > 0 and world()[1] == 1
    return computed if alone and DTYPES.get(stored) == computed else torch.float32


@torch.no_grad()
def load_weights(policy: nn.Module, read: Callable[[str], Tensor]) -> None:
    """Fill every parameter from tensors with the checkpoint's names."""
    if isinstance(policy, ForeignPolicy):
        targets = {name: tensor for name, (_, tensor) in _foreign_tensors(policy).items()}
        found = policy.format.from_checkpoint(read)
    else:
        targets = {n: p for n, p in policy.named_parameters() if not is_adapter(n)}
        found = ((n, _from_checkpoint(n, p.shape[0], read)) for n, p in [*targets.items()])
    for name, tensor in found:
        target = targets.pop(name)
        require(
            (
                tensor.shape == target.shape,
                f"tensor '{name}' has shape {tuple(tensor.shape)}, the config says "
                f"{tuple(target.shape)}",
            )
        )
        target.copy_(like_shard(tensor, target))
    assert not targets, f"no checkpoint tensor fills {sorted(targets)}"


def _from_checkpoint(name: str, num_experts: int, read: Callable[[str], Tensor]) -> Tensor:
    """One parameter of the decoder, read from a checkpoint by the checkpoint's names."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return read(checkpoint_name(name))

    experts = (f"{prefix}.{expert}" for expert in range(num_experts))
    names = ([f"{expert}.{part}.weight" for part in _EXPERTS[kind]] for expert in experts)
    return torch.stack([torch.cat([read(name) for name in of_one]) for of_one in names])


def _to_checkpoint(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors that one parameter of the decoder stands for."""
    prefix, _, kind = name.rpartition(".")
    if not prefix.endswith(".experts"):
        yield checkpoint_name(name), tensor
    else:
        parts = _EXPERTS[kind]
        for expert, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                yield f"{prefix}.{expert}.{part}.weight", rows


def _foreign_tensors(policy: ForeignPolicy) -> dict[str, tuple[str, Tensor]]:
    """What a checkpoint of it holds, by the name that transformers has for it: its name in the
    policy, which adapters may have changed, and the tensor."""
    tensors = {
        checkpoint_name(n): (n, p) for n, p in policy.named_parameters() if not is_adapter(n)
    }
    buffers = dict(policy.inner.named_buffers())
    return {**tensors, **{n: (n, buffers[n]) for n in policy.format.buffers}}


def named_weights(
    policy: nn.Module,
    gather: Callable[[Tensor], Tensor] = lambda t: t,
    merge_dtype: torch.dtype | None = torch.float32,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the Hugging Face checkpoint, adapters merged, one at a time in fixed order.

    Merged in float32, or in numbers of another dtype: those that a policy computes with. None:
    without the adapters, which is what training with adapters resumes from."""

    def whole_of(name: str, tensor: Tensor) -> Tensor:
        whole = gather(tensor.detach())
        return whole if merge_dtype is None else merged(policy, name, whole, gather, merge_dtype)

    if isinstance(policy, ForeignPolicy):
        own = _foreign_tensors(policy)
        yield from policy.format.to_checkpoint(lambda name: whole_of(*own[name]))
    else:
        for name, p in policy.named_parameters():
            if not is_adapter(name):
                yield from _to_checkpoint(name, whole_of(name, p))


def stored_weights(
    policy: nn.Module, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the checkpoint in the dtype of files and versions; buffers keep their own."""
    exact = exact_names(policy)
    return ((name, t if name in exact else t.to(dtype)) for name, t in tensors)


def exact_names(policy: nn.Module) -> frozenset[str]:
    """Tensors of the checkpoint that no training changes and no publication rounds."""
    return policy.format.exact if isinstance(policy, ForeignPolicy) else frozenset()


def copy_weights(twin: nn.Module, policy: nn.Module) -> None:
    """Fill a twin from the policy, adapters merged, shards gathered."""
    load_weights(twin, dict(named_weights(policy, gathered)).__getitem__)


def clone_architecture(policy: Policy, options: TrainerConfig, directory: Path | None) -> Policy:
    """A second policy of the same shape, frozen and in the compute dtype; not yet filled.

    It holds a sealed version or the reference. Every rank has its own, whole. It computes as the
    policy does, which casts its weights to the same dtype where it uses them.
    """
    if isinstance(policy, Decoder):
        return freeze(build_decoder(policy.arch, options, policy.compute_dtype))
    assert directory is not None
    return freeze(load_policy(directory, options))


def freeze(policy: Policy) -> Policy:
    """Weights in the compute dtype, without gradients; every buffer stays as it is."""
    cast_parameters(policy, policy.compute_dtype)
    return policy.requires_grad_(False).eval()


@torch.no_grad()
def clone_adapted(policy: Policy, options: TrainerConfig, directory: Path | None) -> Policy:
    """A frozen twin on the same base with room for the adapter of any version. Base weights come
    from all ranks, so all must enter."""
    twin = clone_architecture(policy, options, directory)
    add_lora(twin, options)
    mine = dict(twin.named_parameters())
    for name, p in policy.named_parameters():
        if not is_adapter(name):
            mine[name].copy_(gathered(p.detach()))
    return freeze(twin)


class Critic(nn.Module):
    """The value model of PPO: a decoder of its own with one number V(s) per state, at the rows that
    predict trained tokens. It starts from the policy's weights, in float32, with a head of zeros,
    so its first values are zero."""

    def __init__(self, twin: Policy, policy: Policy) -> None:
        super().__init__()
        cast_parameters(twin, torch.float32)
        twin.requires_grad_(True)
        copy_weights(twin, policy)
        self.body = twin
        self.head = nn.Parameter(
            torch.zeros(1, policy.hidden, device=next(twin.parameters()).device)
        )

    def forward(self, token_ids_P: Tensor, layout: Layout, rows_T: Tensor) -> Tensor:
        states = self.body.states(token_ids_P, layout).index_select(0, rows_T)
        # Rounded like every other weight: a sharded critic sees its head in the compute dtype only.
        head = self.head.to(states.dtype).float()
        return F.linear(states.float(), head).squeeze(-1)
