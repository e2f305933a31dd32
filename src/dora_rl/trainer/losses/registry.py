"""The objectives by name: the function of a recipe (`recipes`) with its options.

A user's own loss is one function in a file, `path/to/file.py:name`, called like those in this
package and aggregated by `token_mean` unless the options say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dora_rl.trainer.losses.clipped import clipped, decoupled, triplet
from dora_rl.trainer.losses.inputs import LossFunction, LossInputs, LossOutput
from dora_rl.trainer.losses.recipes import fill, is_users_own, recipe_of
from dora_rl.trainer.losses.score import cispo, reinforce
from dora_rl.trainer.losses.sequence import gspo
from dora_rl.trainer.options import AlgorithmOptions
from dora_rl.types import UserError
from dora_rl.user_code import UserCodeError, load_object, one_line

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
    options: AlgorithmOptions
    zero_advantage_is_free: bool = True

    @property
    def aggregation(self) -> str:
        assert self.options.aggregation is not None
        return self.options.aggregation

    @property
    def advantage(self) -> str:
        assert self.options.advantage is not None
        return self.options.advantage

    @property
    def needs_whole_batch(self) -> bool:
        """Advantages that are normalised over the batch cannot be computed on a stream."""
        return self.advantage in ("batch", "gae")

    @property
    def needs_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.options.kl_coef != 0.0

    @property
    def may_skip_zero_advantage(self) -> bool:
        o = self.options
        free = self.zero_advantage_is_free and not self.needs_critic
        kl_in_loss = o.kl_coef != 0.0 and o.kl_in == "loss"
        return o.skip_zero_advantage and free and not kl_in_loss and o.entropy_coef == 0.0


def resolve(options: AlgorithmOptions) -> Objective:
    """The options filled from the recipe, and the function."""
    filled = fill(options)
    if is_users_own(options.loss):
        return Objective(_users_function(options.loss), filled, zero_advantage_is_free=False)
    return Objective(FUNCTIONS[recipe_of(options.loss).function], filled)


def _users_function(name: str) -> LossFunction:
    function = load_object(name, Path("."), section="algorithm", key="algorithm.loss")
    if not callable(function):
        raise UserError(f"algorithm.loss '{name}' is not a function")
    return _checked(function, name)


def _checked(function: Callable[..., object], name: str) -> LossFunction:
    """A user's loss may return the losses per token alone; anything else is refused by name."""

    def call(inputs: LossInputs, options: AlgorithmOptions) -> LossOutput:
        try:
            out = function(inputs, options)
        except Exception as error:
            # Whatever it is, another learner would only come to the same place.
            raise UserCodeError(f"algorithm.loss '{name}' raised {one_line(error)}") from error
        if isinstance(out, Tensor):
            out = LossOutput(out)
        if not isinstance(out, LossOutput) or out.loss_T.shape != inputs.logprobs_T.shape:
            raise UserCodeError(
                f"algorithm.loss '{name}' must return one loss per token, a tensor of shape "
                f"{tuple(inputs.logprobs_T.shape)}, or a LossOutput with it"
            )
        return out

    return call
