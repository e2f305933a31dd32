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
from torch import Tensor, nn

from dora_rl.config import TrainerConfig
from dora_rl.config.section import choose
from dora_rl.model.directory import HfDirectory, read_config
from dora_rl.model.families import spec_from_config
from dora_rl.model.rope import inverse_frequencies
from dora_rl.model.spec import ModelSpec, NotSupported
from dora_rl.trainer.attention.backends import pick_attention
from dora_rl.trainer.distributed import gathered, like_shard, world
from dora_rl.trainer.foreign.check import load_foreign
from dora_rl.trainer.foreign.policy import ForeignPolicy
from dora_rl.trainer.policy.casting import cast_parameters
from dora_rl.trainer.policy.decoder import Decoder, Layer
from dora_rl.trainer.policy.experts import from_checkpoint, to_checkpoint
from dora_rl.trainer.policy.lora import add_lora, is_adapter, merged, plain_name
from dora_rl.types import UserError

Policy: TypeAlias = Decoder | ForeignPolicy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device the user named, or the first GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"trainer.device '{name}': this torch sees no GPU; use device = 'cpu'")
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
    decoder.inv_freq = inverse_frequencies(arch.rope, arch.head_dim)[0].to(device)
    kinds = ("auto", "none", "layer")  # auto: the memory plan of a run has chosen before
    choose("trainer.activation_checkpointing", options.activation_checkpointing, kinds)
    decoder.checkpointing = options.activation_checkpointing == "layer"
    decoder.chunk_tokens = options.logits_chunk_tokens
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
    exact: dict[str, Any] = {"dynamic": True, "options": {"emulate_precision_casts": True}}
    for layer in decoder.model.layers:
        assert isinstance(layer, Layer)
        layer.fuse(**exact)
    decoder.compiled = True
    settings: Any = torch._dynamo.config
    # Otherwise the eps of a norm is an input that may change: a number on the CPU in every layer,
    # and half a minute for a C++ compiler at the start.
    settings.specialize_float = True
    # Beyond it torch runs them as they are, without a word: sizes × with and without gradients.
    settings.recompile_limit = max(settings.recompile_limit, 64)


@torch.no_grad()
def initialise(decoder: Decoder, seed: int, std: float = 0.02) -> None:
    """Random weights, the same for the same seed: norms 1, biases 0, matrices normal."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for name, p in decoder.named_parameters():
        if p.dim() == 1:
            p.fill_(0.0 if name.endswith("bias") else 1.0)
        elif p.is_cuda:
            p.normal_(0.0, std)
        else:
            p.copy_(torch.randn(p.shape, generator=generator) * std)


def load_policy(directory: Path, options: TrainerConfig) -> Policy:
    """Read a model directory into a policy with float32 parameters. A base that only carries
    adapters stays as it is stored, where the policy computes in that."""
    config = read_config(directory)
    choose("trainer.implementation", options.implementation, ("auto", "lean", "transformers"))
    arch = None if options.implementation == "transformers" else lean_spec(config)
    if arch is None:
        if options.implementation == "lean":
            raise UserError(
                f"model '{directory}': the lean decoder does not know this architecture; "
                "use trainer.implementation = 'auto'"
            )
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
    dropout = float(config.get("attention_dropout") or 0.0)
    lean = spec.rope.kind != "yarn" and not dropout and "quantization_config" not in config
    return spec if lean else None


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
        _load_foreign(policy, read)
        return
    for name, p in policy.named_parameters():
        if is_adapter(name):
            continue
        tensor = from_checkpoint(checkpoint_name(name), p.shape, read)
        if tensor.shape != p.shape:
            raise UserError(
                f"tensor '{name}' has shape {tuple(tensor.shape)}, the config says {tuple(p.shape)}"
            )
        p.copy_(like_shard(tensor, p))


def _load_foreign(policy: ForeignPolicy, read: Callable[[str], Tensor]) -> None:
    targets = _foreign_tensors(policy)
    for name, tensor in policy.format.from_checkpoint(read):
        target = targets.pop(name)[1]
        if tensor.shape != target.shape:
            raise UserError(
                f"tensor '{name}' has shape {tuple(tensor.shape)}, the config says "
                f"{tuple(target.shape)}"
            )
        target.copy_(like_shard(tensor, target))
    assert not targets, f"no checkpoint tensor fills {sorted(targets)}"


def _foreign_tensors(policy: ForeignPolicy) -> dict[str, tuple[str, Tensor]]:
    """What a checkpoint of it holds, by the name that transformers has for it: its name in the
    policy, which adapters may have changed, and the tensor."""
    tensors = {
        checkpoint_name(n): (n, p) for n, p in policy.named_parameters() if not is_adapter(n)
    }
    buffers = dict(policy.inner.named_buffers())
    return {**tensors, **{n: (n, buffers[n]) for n in policy.format.buffers}}


def checkpoint_name(name: str) -> str:
    """A parameter's name without the prefixes of modules that wrap a foreign or adapted model."""
    return plain_name(name.removeprefix("inner."))


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
        return
    for name, p in policy.named_parameters():
        if not is_adapter(name):
            yield from to_checkpoint(checkpoint_name(name), whole_of(name, p))


def stored_weights(
    policy: nn.Module, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the checkpoint in the dtype of files and versions; buffers keep their own."""
    exact = exact_names(policy)
    for name, tensor in tensors:
        yield name, tensor if name in exact else tensor.to(dtype)


def exact_names(policy: nn.Module) -> frozenset[str]:
    """Tensors of the checkpoint that no training changes and no publication rounds."""
    return policy.format.exact if isinstance(policy, ForeignPolicy) else frozenset()


def copy_weights(twin: nn.Module, policy: nn.Module) -> None:
    """Fill a twin from the policy, adapters merged, shards gathered."""
    tensors = dict(named_weights(policy, gathered))
    load_weights(twin, tensors.__getitem__)


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
