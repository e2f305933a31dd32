"""Low-rank adapters: added to a policy, published alone or merged, saved as a PEFT directory.

Never trains anything but the adapters. Invariant: what is published is what a policy computes with
(see `linear`), and the saved adapter is what `peft.PeftModel.from_pretrained` loads on top of the
same base model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dora_rl.config import TrainerConfig
from dora_rl.model.directory import HfDirectory, write_adapter
from dora_rl.model.names import LINEAR_LAYERS, PREFIX, SCALE
from dora_rl.trainer.distributed import like_shard
from dora_rl.trainer.policy.linear import ADAPTER, LoraLinear, merged_weight
from dora_rl.types import UserError

if TYPE_CHECKING:
    from dora_rl.ports import SealedWeights

_BASE = ".base_layer."


def add_lora(policy: nn.Module, options: TrainerConfig) -> None:
    """Freeze the policy and add adapters to its linear layers, in place."""
    linear = {n: m for n, m in policy.named_modules() if isinstance(m, nn.Linear)}
    found = {n.rsplit(".", 1)[-1] for n, m in linear.items() if m is not _output_layer(policy)}
    missing = [t for t in options.lora_targets if t not in found]
    if missing:
        raise UserError(
            f"trainer.lora_targets {missing}: no such linear layer of the blocks (the output "
            f"matrix has no adapter); known: {sorted(found)}"
        )
    targets = options.lora_targets or LINEAR_LAYERS
    if not found & set(targets):
        raise UserError(
            "trainer.lora_rank: the model has none of the usual linear layers; name some in "
            f"trainer.lora_targets: {sorted(found)}"
        )
    policy.requires_grad_(False)
    # The same seed gives the same adapters on every rank.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        for name, layer in linear.items():
            parent, _, last = name.rpartition(".")
            if last in targets and layer is not _output_layer(policy):
                setattr(policy.get_submodule(parent), last, LoraLinear(layer, options))
    _refuse_renamed(policy)


def _output_layer(policy: nn.Module) -> nn.Module | None:
    """Log-probs are computed from its weight in chunks, not through the layer (see `logprobs`)."""
    inner: Any = getattr(policy, "inner", None)
    return getattr(policy, "lm_head", None) if inner is None else inner.get_output_embeddings()


@contextmanager
def without_dropout(policy: nn.Module) -> Iterator[None]:
    """For whatever is not a training pass. Adapters alone have dropout; a model's own stays off."""
    adapted = (m for m in policy.modules() if isinstance(m, LoraLinear))
    noisy = [m.lora_dropout for m in adapted if m.lora_dropout.training]
    for module in noisy:
        module.eval()
    try:
        yield
    finally:
        for module in noisy:
            module.train()


def _refuse_renamed(policy: nn.Module) -> None:
    """An adapter is added to the checkpoint's weight of the same name, so there must be one."""
    checkpoint: Any = getattr(policy, "format", None)
    if checkpoint is None:
        return
    names = set(checkpoint.names)
    for name, _ in policy.named_parameters():
        plain = plain_name(name.removeprefix("inner."))
        if _BASE in name and plain not in names:
            raise UserError(
                f"trainer.lora_targets: '{plain}' has another name in the model's files; "
                "leave that layer out"
            )


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """A base parameter's name without peft's wrapper."""
    return name.replace(_BASE, ".")


def merged(
    policy: nn.Module,
    name: str,
    weight: Tensor,
    gather: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """The whole weight with its adapter added, if it has one; all ranks must enter."""
    if _BASE not in name or not name.endswith(".weight"):
        return weight
    layer = policy.get_submodule(name[: name.index(_BASE)])
    assert isinstance(layer, LoraLinear)
    a, b = (gather(t.detach()) for t in layer.factors())
    return merged_weight(weight, a, b, layer.scale, dtype)


def adapter_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """The adapters by the policy's own names."""
    return {n: p.detach() for n, p in policy.named_parameters() if is_adapter(n)}


def peft_name(name: str) -> str:
    """An adapter's name in a PEFT directory and in a published version."""
    return PREFIX + name.removeprefix("inner.").replace(f".{ADAPTER}.", ".")


def published_adapter(
    policy: nn.Module,
    options: TrainerConfig,
    dtype: torch.dtype,
    gather: Callable[[Tensor], Tensor],
) -> list[tuple[str, Tensor]]:
    """A version as its adapter alone: what changes from one version to the next."""
    scale = torch.tensor([options.lora_alpha / options.lora_rank], dtype=torch.float32)
    tensors = [(SCALE, scale)]
    for name, tensor in adapter_tensors(policy).items():
        copy = gather(tensor).to(dtype=dtype, device="cpu", copy=True).contiguous()
        tensors.append((peft_name(name), copy))
    return tensors


def merged_reader(sealed: SealedWeights, base: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Reads a published adapter as whole weights: base + (alpha/rank)·B·A, tensor by tensor."""
    adapted, scale = set(sealed.names()), float(sealed.tensor(SCALE))

    def read(name: str) -> Tensor:
        weight = base(name)
        down = f"{PREFIX}{name.removesuffix('.weight')}.lora_A.weight"
        if down not in adapted:
            return weight
        a, b = sealed.tensor(down), sealed.tensor(down.replace("lora_A", "lora_B"))
        delta = scale * (b.float() @ a.float()).to(weight.device)
        return (weight.float() + delta).to(weight.dtype)

    return read


class MergedVersion:
    """A published adapter on the base in a model directory, as whole weights."""

    def __init__(self, sealed: SealedWeights, base: Path) -> None:
        self.version = sealed.version
        self._reader = HfDirectory(base)
        self.tensor = merged_reader(sealed, self._reader.tensor)

    def names(self) -> list[str]:
        return list(self._reader.names())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names():
            yield name, self.tensor(name)


def is_published_adapter(sealed: SealedWeights) -> bool:
    return SCALE in sealed.names()


def whole_version(sealed: Any, base: str | Path) -> Any:
    """A sealed version as whole weights, whichever way it was published."""
    return MergedVersion(sealed, Path(base)) if is_published_adapter(sealed) else sealed


def load_published_adapter(policy: nn.Module, sealed: SealedWeights) -> None:
    """Continue from a published version."""
    if not is_published_adapter(sealed):
        raise UserError("a published version has its adapters merged; resume a checkpoint")
    names = adapter_tensors(policy)
    load_adapter_tensors(policy, {name: sealed.tensor(peft_name(name)) for name in names})


@torch.no_grad()
def load_adapter_tensors(policy: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, p in policy.named_parameters():
        if is_adapter(name):
            p.copy_(like_shard(tensors[name], p))


def save_adapter(
    directory: Path, adapters: dict[str, Tensor], options: TrainerConfig, base: str
) -> None:
    """As a PEFT directory. The adapters are whole, by the policy's names."""
    write_adapter(
        directory,
        {peft_name(name): tensor for name, tensor in adapters.items()},
        rank=options.lora_rank,
        alpha=options.lora_alpha,
        dropout=options.lora_dropout,
        base=base,
    )
