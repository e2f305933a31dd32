"""The objectives by name. A recipe is a loss function with the choices its paper made.

Invariant: `resolve` returns options with nothing left open (no None where the loss needs a value),
and everything the user set explicitly wins over the recipe. A user's own loss is one function in a
file, `path/to/file.py:name`, called like those in this package and aggregated by `token_mean`
unless the options say otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from torch import Tensor

from dora_rl.trainer.advantages import ADVANTAGES
from dora_rl.trainer.corrections import CORRECTIONS
from dora_rl.trainer.losses.aggregate import AGGREGATIONS
from dora_rl.trainer.losses.clipped import clipped, decoupled, triplet
from dora_rl.trainer.losses.inputs import LossFunction, LossInputs, LossOutput
from dora_rl.trainer.losses.penalties import KL
from dora_rl.trainer.losses.score import cispo, reinforce
from dora_rl.trainer.losses.sequence import gspo
from dora_rl.trainer.options import AlgorithmOptions, choose
from dora_rl.types import UserError

OLD_LOGPROBS = ("rollout", "behaviour", "proximal")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A loss and the defaults that go with it.

    `zero_advantage_is_free` says that a sequence whose advantages are all zero adds nothing to the
    gradient, so its forward pass may be skipped.
    """

    function: LossFunction
    advantage: str = "group"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    old_logprobs: str = "rollout"
    constant_tokens: int | None = None
    corrections: tuple[str, ...] = ()
    zero_advantage_is_free: bool = True


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(clipped, aggregation="sequence_mean"),
    "dr_grpo": Recipe(clipped, advantage="group_mean", aggregation="constant"),
    "dapo": Recipe(clipped, clip_high=0.28),
    "rloo": Recipe(reinforce, advantage="leave_one_out", aggregation="constant", constant_tokens=1),
    "reinforce++": Recipe(clipped, advantage="batch"),
    "gspo": Recipe(gspo, aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": Recipe(cispo, clip_low=1.0, clip_high=4.0),
    "ppo": Recipe(clipped, advantage="gae"),
    "decoupled_ppo": Recipe(decoupled, old_logprobs="proximal"),
    "longcat": Recipe(
        triplet,
        advantage="group_mean",
        aggregation="constant",
        clip_high=0.28,
        dual_clip=5.0,
        old_logprobs="behaviour",
        corrections=("token_tis",),
    ),
    "reinforce": Recipe(reinforce, advantage="group_mean"),
}


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss ready to use: the function and options with every choice made."""

    function: LossFunction
    options: AlgorithmOptions
    zero_advantage_is_free: bool

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
    """Check every name, fill what the user left open from the recipe."""
    recipe = _recipe(options.loss)
    filled = replace(
        options,
        advantage=options.advantage or recipe.advantage,
        aggregation=options.aggregation or recipe.aggregation,
        clip_low=recipe.clip_low if options.clip_low is None else options.clip_low,
        clip_high=recipe.clip_high if options.clip_high is None else options.clip_high,
        dual_clip=recipe.dual_clip if options.dual_clip is None else options.dual_clip,
        old_logprobs=options.old_logprobs or recipe.old_logprobs,
        constant_tokens=options.constant_tokens or recipe.constant_tokens,
        corrections=recipe.corrections if options.corrections is None else options.corrections,
    )
    _check(filled)
    return Objective(recipe.function, filled, recipe.zero_advantage_is_free)


def _check(options: AlgorithmOptions) -> None:
    assert options.advantage and options.aggregation and options.old_logprobs
    choose("algorithm.advantage", options.advantage, ADVANTAGES)
    choose("algorithm.aggregation", options.aggregation, AGGREGATIONS)
    choose("algorithm.old_logprobs", options.old_logprobs, OLD_LOGPROBS)
    choose("algorithm.kl_estimator", options.kl_estimator, KL)
    choose("algorithm.kl_in", options.kl_in, ("loss", "reward"))
    choose("algorithm.correction_numerator", options.correction_numerator, ("old", "current"))
    for name in options.corrections or ():
        choose("algorithm.corrections", name, CORRECTIONS)
    if options.aggregation == "constant" and not options.constant_tokens:
        raise UserError(
            "algorithm.aggregation 'constant' needs algorithm.constant_tokens "
            "(the longest response, say): the denominator per sequence"
        )
    if options.temperature <= 0:
        raise UserError("algorithm.temperature must be above 0 (it is the rollout's temperature)")


def _recipe(name: str) -> Recipe:
    if ":" not in name:
        return RECIPES[choose("algorithm.loss", name, RECIPES)]
    place, _, function_name = name.rpartition(":")
    function = getattr(_load(place, name), function_name, None)
    if not callable(function):
        raise UserError(f"algorithm.loss '{name}': no function '{function_name}' there")
    return Recipe(_checked(function, name), zero_advantage_is_free=False)


def _checked(function: Callable[..., object], name: str) -> LossFunction:
    """A user's loss may return the losses per token alone; anything else is refused by name."""

    def call(inputs: LossInputs, options: AlgorithmOptions) -> LossOutput:
        out = function(inputs, options)
        if isinstance(out, Tensor):
            out = LossOutput(out)
        if not isinstance(out, LossOutput) or out.loss_T.shape != inputs.logprobs_T.shape:
            raise UserError(
                f"algorithm.loss '{name}' must return one loss per token, a tensor of shape "
                f"{tuple(inputs.logprobs_T.shape)}, or a LossOutput with it"
            )
        return out

    return call


def _load(place: str, name: str) -> ModuleType:
    """The user's file or module; their own errors pass through unchanged."""
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UserError(f"algorithm.loss '{name}': {error}") from error
    path = Path(place)
    if not path.is_file():
        raise UserError(f"algorithm.loss '{name}': no file '{place}'")
    spec = importlib.util.spec_from_file_location(f"dora_rl_user_loss_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
