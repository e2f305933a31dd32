"""Putting a learner's models together: policy, adapters, reference, critic, shards, optimizers.

Invariant: copies (reference, critic) are taken from the policy before adapters are added and before
anything is sharded, so they start from exactly the weights the run starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dora_rl.config import TrainerConfig
from dora_rl.trainer import distributed
from dora_rl.trainer.critic import Critic, make_critic
from dora_rl.trainer.losses.registry import Objective
from dora_rl.trainer.optim import Optimizer
from dora_rl.trainer.packing import quadratic_tokens
from dora_rl.trainer.policy.decoder import Decoder
from dora_rl.trainer.policy.lora import add_lora
from dora_rl.trainer.policy.model import (
    Policy,
    clone_adapted,
    clone_architecture,
    copy_weights,
    freeze,
    load_policy,
)


@dataclass(slots=True)
class Assembly:
    """What is trained (policy, critic), what is not (reference), and how to make a twin."""

    policy: Policy
    reference: Policy | None
    critic: Critic | None
    optimizer: Optimizer
    critic_optimizer: Optimizer | None
    make_twin: Callable[[], Policy]
    make_adapted: Callable[[], Policy]  # a twin with room for an adapter


def assemble(
    model: Path | Policy, objective: Objective, options: TrainerConfig, directory: Path | None
) -> Assembly:
    """Load or take the policy and build everything around it."""
    policy = load_policy(model, options) if isinstance(model, Path) else model

    def make_twin() -> Policy:
        return clone_architecture(policy, options, directory)

    reference = _reference(policy, objective, options, make_twin)
    critic = make_critic(make_twin(), policy) if objective.needs_critic else None
    if options.lora_rank:
        add_lora(policy, options)
    if distributed.world()[1] > 1:
        _shard(policy, critic)
    critic_lr = objective.options.critic_lr
    return Assembly(
        policy,
        reference,
        critic,
        Optimizer(policy, options),
        Optimizer(critic, options, critic_lr) if critic is not None else None,
        make_twin,
        lambda: clone_adapted(policy, options, directory),
    )


def _reference(
    policy: Policy, objective: Objective, options: TrainerConfig, make_twin: Callable[[], Policy]
) -> Policy | None:
    if not objective.needs_reference:
        return None
    if options.reference_model:
        return freeze(load_policy(Path(options.reference_model), options))
    twin = make_twin()
    copy_weights(twin, policy)
    if options.lora_rank and options.lora_publish == "adapters":
        add_lora(twin, options)  # new ones add nothing, in the policy's own order of sums
    return freeze(twin)


def _shard(policy: Policy, critic: Critic | None) -> None:
    for module, body in ((policy, policy), (critic, critic.body if critic else None)):
        if module is not None:
            layers = list(body.model.layers) if isinstance(body, Decoder) else []
            distributed.shard(module, layers, policy.compute_dtype)


def attention_crossover_tokens(policy: Policy) -> float:
    """The document length at which attention costs as much as the matrices; see `packing`."""
    if not isinstance(policy, Decoder):
        return 8192.0
    arch = policy.arch
    return quadratic_tokens(arch.num_heads * arch.head_dim, arch.layer_params_active())


def train_flops(policy: Policy, lengths: Sequence[int], adapter_params: int) -> float | None:
    """Of forward and backward over documents; None where the shape of the model is not known."""
    if not isinstance(policy, Decoder):
        return None
    return policy.arch.train_flops(lengths, adapter_params)
