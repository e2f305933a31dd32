"""Saving and restoring a learner: what a checkpoint holds beyond the model itself.

Invariant: `restore(save(learner))` gives a learner whose next step is bit-identical on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dora_rl.trainer import checkpoint
from dora_rl.trainer.distributed import gathered
from dora_rl.trainer.model import load_weights, named_weights
from dora_rl.trainer.weights import write_model

if TYPE_CHECKING:
    from dora_rl.trainer.learner import Learner

FORMAT = 1
_SHARD_BYTES_MAX = 4 << 30


def save(learner: Learner, directory: Path) -> Path:
    """Write everything atomically; rank 0 writes, the others take part in gathering."""
    dtype = learner.policy.compute_dtype
    masters = {n: t.float() for n, t in named_weights(learner.policy, gathered)}
    moments = {n: gathered(t) for n, t in learner.optimizer.state_tensors().items()}
    if learner.rank:
        return directory

    def fill(target: Path) -> None:
        trainer = target / checkpoint.TRAINER
        trainer.mkdir()
        if learner.directory is not None:
            checkpoint.copy_side_files(learner.directory, target)
        write_model(target, ((n, t.to(dtype)) for n, t in masters.items()), _SHARD_BYTES_MAX)
        if dtype != torch.float32:
            checkpoint.save_tensors(trainer / "masters.safetensors", masters)
        checkpoint.save_tensors(trainer / "optimizer.safetensors", moments)
        checkpoint.save_tensors(trainer / "rng.safetensors", checkpoint.rng_tensors())
        state = {
            "format": FORMAT,
            "next_step": learner.next_step,
            "num_updates": learner.num_updates,
            "num_applied": learner.optimizer.num_applied,
        }
        (trainer / "state.json").write_text(json.dumps(state, indent=2))

    checkpoint.write_atomically(directory, fill)
    return directory


def restore(learner: Learner, directory: Path) -> None:
    """Bring a fresh learner, already holding the directory's weights, to where `save` was."""
    state = checkpoint.read_state(directory)
    trainer = directory / checkpoint.TRAINER
    if (trainer / "masters.safetensors").is_file():
        masters = checkpoint.load_tensors(trainer / "masters.safetensors")
        load_weights(learner.policy, masters.__getitem__)
    moments = checkpoint.load_tensors(trainer / "optimizer.safetensors")
    learner.optimizer.load_state_tensors(moments)
    learner.optimizer.num_applied = int(state["num_applied"])
    learner.next_step = int(state["next_step"])
    learner.num_updates = int(state["num_updates"])
    checkpoint.restore_rng(checkpoint.load_tensors(trainer / "rng.safetensors"))
