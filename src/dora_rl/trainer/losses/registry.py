"""The objectives by name: the function of a recipe (`recipes`) with its options.

A user's own loss is one function in a file, `path/to/file.py:name`, called like those in this
package and aggregated by `token_mean` unless the options say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora_rl.config import AlgorithmConfig
from dora_rl.trainer.losses.advantages import PER_GROUP, GroupAdvantage
from dora_rl.trainer.losses.aggregate import denominator
from dora_rl.trainer.losses.functions import cispo, clipped, decoupled, gspo, reinforce, triplet
from dora_rl.trainer.losses.inputs import LossFunction
from dora_rl.trainer.losses.own import own_advantage, own_loss
from dora_rl.trainer.losses.recipes import fill, is_users_own, recipe_of

FUNCTIONS: dict[str, LossFunction] = {
    "clipped": clipped,
    "decoupled": decoupled,
    "triplet": triplet,
    "reinforce": reinforce,
    "cispo": cispo,
    "gspo": gspo,
}


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss ready to use: the function and options with every choice made.

    `zero_advantage_is_free` says that a sequence whose advantages are all zero adds nothing to the
    gradient, so its forward pass may be skipped.
    """

    function: LossFunction
    options: AlgorithmConfig
    group_advantage: GroupAdvantage | None  # None: it takes the whole batch
    zero_advantage_is_free: bool = True

    @property
    def aggregation(self) -> str:
        assert self.options.aggregation is not None
        return self.options.aggregation

    def denominator(self, num_tokens: int, num_sequences: int) -> float:
        """What the numerator of a whole update is divided by."""
        constant = self.options.constant_tokens
        return denominator(self.aggregation, num_tokens, num_sequences, constant)

    @property
    def advantage(self) -> str:
        assert self.options.advantage is not None
        return self.options.advantage

    @property
    def needs_whole_batch(self) -> bool:
        """Advantages that are normalised over the batch cannot be computed on a stream."""
        return self.group_advantage is None

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.options.reference or self.options.kl_coef != 0.0

    @property
    def may_skip_zero_advantage(self) -> bool:
        o = self.options
        free = self.zero_advantage_is_free and not self.needs_critic
        kl_in_loss = o.kl_coef != 0.0 and o.kl_in == "loss"
        return o.skip_zero_advantage and free and not kl_in_loss and o.entropy_coef == 0.0


def resolve(options: AlgorithmConfig) -> Objective:
    """The options filled from the recipe, and the functions."""
    filled = fill(options)
    name = filled.advantage
    assert name is not None
    own = own_advantage(name, filled.advantage_args) if is_users_own(name) else None
    advantage = own or PER_GROUP.get(name)
    if is_users_own(options.loss):
        loss = own_loss(options.loss, filled.loss_args)
        return Objective(loss, filled, advantage, zero_advantage_is_free=False)
    return Objective(FUNCTIONS[recipe_of(options.loss).function], filled, advantage)
