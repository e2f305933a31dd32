"""Saving and restoring a learner: what a checkpoint, and what a sealed version, holds beyond the
model itself.

    checkpoint        everything, under one name                       `save`, `restore`
    sealed version    the published weights                            (`publish`)
      beside it       what rounding took from the masters, adapters,   `unpublished`, `adopt`
                      critic, counters, random generators
    moments           the optimizers', of some version up to that      `moments`, `load_moments`

Invariants: `restore(save(learner))` gives a learner whose next step is bit-identical on a CPU, and
so does a sealed version with what is beside it and the moments of the same version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dora_rl.config import CheckpointConfig
from dora_rl.model.directory import write_model
from dora_rl.trainer.checkpoints import checkpoint
from dora_rl.trainer.checkpoints.masters import prefixed, whole, with_prefix
from dora_rl.trainer.distributed import gathered, like_shard, wait_for_all
from dora_rl.trainer.optim import Optimizer
from dora_rl.trainer.policy.lora import (
    adapter_tensors,
    is_adapter,
    load_adapter_tensors,
    plain_name,
    save_adapter,
)
from dora_rl.trainer.policy.model import (
    load_weights,
    named_weights,
    pick_dtype,
    stored_weights,
)
from dora_rl.types import UserError

if TYPE_CHECKING:
    from dora_rl.ports import SealedWeights
    from dora_rl.trainer.learner import Learner

FORMAT = 1
# Names of what lies beside a version and of moments, before the parameter's own.
ADAPTER, CRITIC, POLICY, RANDOM = "adapter:", "critic:", "policy:", "random:"
COUNTERS = "counters"  # of a version: JSON as bytes


def save(learner: Learner, directory: Path, options: CheckpointConfig) -> Path:
    """Write everything atomically; rank 0 writes, the others take part in gathering and wait."""
    dtype = learner.policy.compute_dtype
    if options.dtype != "auto":
        dtype = pick_dtype(options.dtype, learner.device, "checkpoint.dtype")
    lora = bool(learner.options.lora_rank)
    weights = {n: t.float() for n, t in named_weights(learner.policy, gathered)}
    masters = dict(named_weights(learner.policy, gathered, None)) if lora else weights
    parts = {"optimizer": _moments(learner.optimizer)}
    if lora:
        parts["adapters"] = {n: gathered(t) for n, t in adapter_tensors(learner.policy).items()}
    if learner.critic is not None and learner.critic_optimizer is not None:
        parts["critic"] = {n: gathered(p) for n, p in learner.critic.named_parameters()}
        parts["critic_optimizer"] = _moments(learner.critic_optimizer)
    if learner.reference is not None and not learner.options.reference_model:
        parts["reference"] = _frozen(learner.reference)

    def fill(target: Path) -> None:
        trainer = target / checkpoint.TRAINER
        trainer.mkdir()
        if learner.directory is not None:
            checkpoint.copy_side_files(learner.directory, target)
        tensors = stored_weights(learner.policy, weights.items(), dtype)
        write_model(target, tensors, options.shard_bytes_max)
        if lora or dtype != torch.float32:
            checkpoint.save_tensors(trainer / "masters.safetensors", masters)
        for name, tensors in parts.items():
            checkpoint.save_tensors(trainer / f"{name}.safetensors", tensors)
        if lora:
            base = str(learner.directory or "")
            save_adapter(target / "adapter", parts["adapters"], learner.options, base)
        checkpoint.save_tensors(trainer / "rng.safetensors", checkpoint.rng_tensors())
        files = checkpoint.tensor_digests(target)
        state = {**_counters(learner), "format": checkpoint.FORMAT, "files": files}
        (trainer / "state.json").write_text(json.dumps(state, indent=2) + "\n")

    if learner.rank == 0:
        checkpoint.write_atomically(directory, fill)
    wait_for_all()
    return directory


def _frozen(reference: nn.Module) -> dict[str, Tensor]:
    """A reference's weights by the model's own names. Its adapters, if any, are new ones."""
    named = reference.named_parameters()
    return {plain_name(n): p.detach() for n, p in named if not is_adapter(n)}


def _moments(optimizer: Optimizer) -> dict[str, Tensor]:
    return {n: gathered(t) for n, t in optimizer.state_tensors().items()}


def restore(learner: Learner, directory: Path) -> None:
    """Bring a fresh learner, already holding the directory's weights, to where `save` was."""
    state = checkpoint.read_state(directory)
    trainer = directory / checkpoint.TRAINER
    if (trainer / "masters.safetensors").is_file():
        masters = checkpoint.load_tensors(trainer / "masters.safetensors")
        load_weights(learner.policy, masters.__getitem__)
    load_saved_moments(learner, directory)
    if learner.options.lora_rank:
        adapters = checkpoint.load_tensors(trainer / "adapters.safetensors")
        load_adapter_tensors(learner.policy, adapters)
    if learner.critic is not None:
        _fill(learner.critic, checkpoint.load_tensors(trainer / "critic.safetensors"))
    if learner.reference is not None and not learner.options.reference_model:
        saved = checkpoint.load_tensors(trainer / "reference.safetensors")
        for name, p in _frozen(learner.reference).items():
            p.copy_(saved[name])
    _set_counters(learner, state)
    checkpoint.restore_rng(checkpoint.load_tensors(trainer / "rng.safetensors"))


def _counters(learner: Learner) -> dict[str, int]:
    return {
        "format": FORMAT,
        "next_step": learner.next_step,
        "num_updates": learner.num_updates,  # where the schedule is
        "num_applied": learner.optimizer.num_applied,
    }


def _set_counters(learner: Learner, counters: dict[str, int]) -> None:
    learner.optimizer.num_applied = int(counters["num_applied"])
    learner.next_step = int(counters["next_step"])
    learner.num_updates = int(counters["num_updates"])


def unpublished(learner: Learner, first: bool) -> dict[str, Tensor]:
    """Copies of what makes a version exact, without the masters' lower halves (see `publish`).
    All ranks take part; the first one has the result."""
    out = prefixed(ADAPTER, adapter_tensors(learner.policy)) if learner.options.lora_rank else {}
    if learner.critic is not None:
        out |= prefixed(CRITIC, {n: p.detach() for n, p in learner.critic.named_parameters()})
    copies: dict[str, Tensor] = {}
    for name, tensor in out.items():
        full = gathered(tensor)
        if first:
            copies[name] = full.to("cpu", copy=True)
    copies |= prefixed(RANDOM, checkpoint.rng_tensors())
    text = json.dumps(_counters(learner)).encode()
    copies[COUNTERS] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return copies


def adopt(learner: Learner, sealed: SealedWeights, beside: SealedWeights) -> None:
    """Everything but the moments as it was when the version was published."""
    if sealed.canary != beside.canary:
        raise UserError(
            f"version {sealed.version}: the learner's masters beside it belong to other weights"
        )
    if learner.options.lora_rank:
        load_adapter_tensors(learner.policy, with_prefix(ADAPTER, beside))
    else:
        load_weights(learner.policy, lambda name: whole(name, sealed.tensor(name), beside))
    if learner.critic is not None:
        _fill(learner.critic, with_prefix(CRITIC, beside))
    _set_counters(learner, json.loads(bytes(beside.tensor(COUNTERS).tolist())))
    checkpoint.restore_rng(with_prefix(RANDOM, beside))


def moments(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """The optimizers' moments as they are, whole, one at a time: on several ranks a collective."""
    for prefix, optimizer in _optimizers(learner):
        for name, tensor in optimizer.state_tensors().items():
            yield prefix + name, gathered(tensor)


def load_moments(learner: Learner, sealed: SealedWeights) -> None:
    """Of the version that `sealed` was written for; the learner may be at a later one."""
    for prefix, optimizer in _optimizers(learner):
        optimizer.load_state_tensors(
            {name: tensor.clone() for name, tensor in with_prefix(prefix, sealed).items()}
        )


def load_saved_moments(learner: Learner, directory: Path) -> None:
    """Those of a checkpoint."""
    trainer = directory / checkpoint.TRAINER
    for (_, optimizer), name in zip(
        _optimizers(learner), ("optimizer", "critic_optimizer"), strict=False
    ):
        optimizer.load_state_tensors(checkpoint.load_tensors(trainer / f"{name}.safetensors"))


def _optimizers(learner: Learner) -> list[tuple[str, Optimizer]]:
    critic = learner.critic_optimizer
    return [(POLICY, learner.optimizer), *([(CRITIC, critic)] if critic is not None else [])]


@torch.no_grad()
def _fill(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, p in module.named_parameters():
        p.copy_(like_shard(tensors[name], p))
