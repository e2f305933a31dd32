"""Saving and restoring a learner: what a checkpoint holds beyond the model itself.

Invariant: `restore(save(learner))` gives a learner whose next step is bit-identical on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dora_rl.trainer import checkpoint
from dora_rl.trainer.distributed import gathered, like_shard, wait_for_all
from dora_rl.trainer.lora import adapter_tensors, load_adapter_tensors, save_adapter
from dora_rl.trainer.model import base_weights, load_weights, named_weights, pick_dtype
from dora_rl.trainer.optim import Optimizer
from dora_rl.trainer.options import CheckpointOptions
from dora_rl.trainer.weights import write_model

if TYPE_CHECKING:
    from dora_rl.trainer.learner import Learner

FORMAT = 1


def save(learner: Learner, directory: Path, options: CheckpointOptions) -> Path:
    """Write everything atomically; rank 0 writes, the others take part in gathering and wait."""
    dtype = learner.policy.compute_dtype
    if options.dtype != "auto":
        dtype = pick_dtype(options.dtype, learner.device, "checkpoint.dtype")
    lora = bool(learner.options.lora_rank)
    weights = {n: t.float() for n, t in named_weights(learner.policy, gathered)}
    masters = {n: gathered(t) for n, t in base_weights(learner.policy)} if lora else weights
    parts = {"optimizer": _moments(learner.optimizer)}
    if lora:
        parts["adapters"] = {n: gathered(t) for n, t in adapter_tensors(learner.policy).items()}
    if learner.critic is not None and learner.critic_optimizer is not None:
        parts["critic"] = {n: gathered(p) for n, p in learner.critic.named_parameters()}
        parts["critic_optimizer"] = _moments(learner.critic_optimizer)
    if learner.reference is not None and not learner.options.reference_model:
        parts["reference"] = dict(learner.reference.named_parameters())

    def fill(target: Path) -> None:
        trainer = target / checkpoint.TRAINER
        trainer.mkdir()
        if learner.directory is not None:
            checkpoint.copy_side_files(learner.directory, target)
        write_model(target, ((n, t.to(dtype)) for n, t in weights.items()), options.shard_bytes_max)
        if lora or dtype != torch.float32:
            checkpoint.save_tensors(trainer / "masters.safetensors", masters)
        for name, tensors in parts.items():
            checkpoint.save_tensors(trainer / f"{name}.safetensors", tensors)
        if lora:
            base = str(learner.directory or "")
            save_adapter(target / "adapter", parts["adapters"], learner.options, base)
        checkpoint.save_tensors(trainer / "rng.safetensors", checkpoint.rng_tensors())
        state = {
            "format": FORMAT,
            "next_step": learner.next_step,
            "num_updates": learner.num_updates,
            "num_applied": learner.optimizer.num_applied,
        }
        (trainer / "state.json").write_text(json.dumps(state, indent=2) + "\n")

    if learner.rank == 0:
        checkpoint.write_atomically(directory, fill)
    wait_for_all()
    return directory


def _moments(optimizer: Optimizer) -> dict[str, Tensor]:
    return {n: gathered(t) for n, t in optimizer.state_tensors().items()}


def restore(learner: Learner, directory: Path) -> None:
    """Bring a fresh learner, already holding the directory's weights, to where `save` was."""
    state = checkpoint.read_state(directory)
    trainer = directory / checkpoint.TRAINER
    if (trainer / "masters.safetensors").is_file():
        masters = checkpoint.load_tensors(trainer / "masters.safetensors")
        load_weights(learner.policy, masters.__getitem__)
    learner.optimizer.load_state_tensors(checkpoint.load_tensors(trainer / "optimizer.safetensors"))
    if learner.options.lora_rank:
        adapters = checkpoint.load_tensors(trainer / "adapters.safetensors")
        load_adapter_tensors(learner.policy, adapters)
    if learner.critic is not None and learner.critic_optimizer is not None:
        _fill(learner.critic, checkpoint.load_tensors(trainer / "critic.safetensors"))
        learner.critic_optimizer.load_state_tensors(
            checkpoint.load_tensors(trainer / "critic_optimizer.safetensors")
        )
    if learner.reference is not None and not learner.options.reference_model:
        _fill(learner.reference, checkpoint.load_tensors(trainer / "reference.safetensors"))
    learner.optimizer.num_applied = int(state["num_applied"])
    learner.next_step = int(state["next_step"])
    learner.num_updates = int(state["num_updates"])
    checkpoint.restore_rng(checkpoint.load_tensors(trainer / "rng.safetensors"))


@torch.no_grad()
def _fill(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, p in module.named_parameters():
        p.copy_(like_shard(tensors[name], p))
