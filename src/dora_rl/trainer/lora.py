"""Low-rank adapters through peft: injected, merged for publication, saved as a PEFT directory.

Never trains anything but the adapters. Invariant: the merged weight of a layer is
base + (alpha/rank)·B·A in float32, and the saved adapter is what `peft.PeftModel.from_pretrained`
loads on top of the same base model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dora_rl.trainer.options import TrainerOptions
from dora_rl.types import UserError

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTER = "default"
_BASE = ".base_layer."


def add_lora(policy: nn.Module, options: TrainerOptions) -> None:
    """Freeze the policy and add adapters to its linear layers, in place."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError("trainer.lora_rank needs the package peft: pip install peft") from error
    targets = list(options.lora_targets or LINEAR_LAYERS)
    found = {n.rsplit(".", 1)[-1] for n, m in policy.named_modules() if isinstance(m, nn.Linear)}
    missing = [t for t in targets if t not in found]
    if options.lora_targets and missing:
        raise UserError(
            f"trainer.lora_targets {missing}: no such linear layer; known: {sorted(found)}"
        )
    policy.requires_grad_(False)
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=options.lora_dropout,
        target_modules=[t for t in targets if t in found],
    )
    # The same seed gives the same adapters on every rank.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        inject_adapter_in_model(config, policy, adapter_name=_ADAPTER)


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """A base parameter's name without peft's wrapper."""
    return name.replace(_BASE, ".")


def merged(policy: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The weight with its adapter added, if it has one."""
    if _BASE not in name or not name.endswith(".weight"):
        return weight
    layer: Any = policy.get_submodule(name[: name.index(_BASE)])
    return weight + layer.get_delta_weight(_ADAPTER).to(weight.dtype)


def adapter_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """The adapters by the policy's own names."""
    return {n: p.detach() for n, p in policy.named_parameters() if is_adapter(n)}


@torch.no_grad()
def load_adapter_tensors(policy: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, p in policy.named_parameters():
        if is_adapter(name):
            p.copy_(tensors[name])


def save_adapter(directory: Path, policy: nn.Module, options: TrainerOptions, base: str) -> None:
    """A PEFT directory: adapter_config.json and adapter_model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{n.removeprefix('inner.').replace(f'.{_ADAPTER}.', '.')}": t.cpu()
        for n, t in adapter_tensors(policy).items()
    }
    save_file(
        {n: t.contiguous() for n, t in tensors.items()}, directory / "adapter_model.safetensors"
    )
    targets = sorted({n.split(".lora_")[0].rsplit(".", 1)[-1] for n in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.lora_rank,
        "lora_alpha": options.lora_alpha,
        "lora_dropout": options.lora_dropout,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
