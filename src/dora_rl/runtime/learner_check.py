"""What the learner would refuse after the start, found before it.

Imports torch only for a loss or an advantage of the user's and for a device that is named.
"""

from __future__ import annotations

from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.engine.models import read_spec
from dora_rl.runtime.model_check import check_weights
from dora_rl.trainer.losses.recipes import fill, is_users_own
from dora_rl.trainer.options import (
    ATTENTION_LAYERS,
    LINEAR_LAYERS,
    AlgorithmOptions,
    TrainerOptions,
    check_attention,
    check_schedule,
    choose,
    from_section,
)
from dora_rl.types import UserError


def check_learner(config: RunConfig) -> None:
    """Losses, schedules, adapters and the reference."""
    algorithm = from_section(AlgorithmOptions, config.algorithm)
    trainer = from_section(TrainerOptions, config.trainer)
    fill(algorithm)
    check_schedule(trainer)
    _check_adapters(config, trainer)
    if trainer.reference_model:
        _check_reference(config, Path(trainer.reference_model))
    if is_users_own(algorithm.loss) or is_users_own(algorithm.advantage or ""):
        from dora_rl.trainer.losses.registry import resolve

        resolve(algorithm)


def check_learner_device(config: RunConfig, device: str) -> None:
    """`device`: the run's, which the learner takes where trainer.device is auto."""
    name = config.trainer.device if config.trainer.device != "auto" else device
    if name.startswith("cuda") and not device.startswith("cuda"):
        from dora_rl.trainer.model import pick_device

        pick_device(name)
    trainer = config.trainer
    check_attention(trainer.attention, on_gpu=name.startswith("cuda"), dtype=trainer.compute_dtype)


def _check_adapters(config: RunConfig, trainer: TrainerOptions) -> None:
    if not trainer.lora_rank:
        return
    spec = read_spec(config.model.path)
    dense = spec.moe is None or len(spec.moe.sparse_layers) < spec.num_layers
    # The layers of the blocks: neither learner nor instances have an adapter for the output matrix.
    known = LINEAR_LAYERS if dense else ATTENTION_LAYERS
    for target in trainer.lora_targets:
        choose("layer in trainer.lora_targets", target, known)


def _check_reference(config: RunConfig, path: Path) -> None:
    check_weights(path, "trainer.reference_model")
    policy, reference = read_spec(config.model.path), read_spec(path)
    if policy.vocab != reference.vocab:
        raise UserError(
            f"trainer.reference_model: {path} has {reference.vocab} tokens, "
            f"the model has {policy.vocab}; give one with the same tokenizer"
        )
