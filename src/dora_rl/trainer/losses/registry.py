"""The objectives by name: the function of a recipe (`recipes`) with its options.

A loss or an advantage of the user's own is one function in a file, `path/to/file.py:name`, called
like those in this package; a loss is aggregated by `token_mean` unless the options say otherwise.
Each has a table of arguments in the configuration (`algorithm.loss_args`, `.advantage_args`), which
is checked against its signature. Invariant: whatever it raises or returns wrongly is one line that
names it and the line of its code, and ends the run; another learner would only come to the same
place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Any

from torch import Tensor

from dora_rl.config import AlgorithmConfig
from dora_rl.config.section import choose
from dora_rl.trainer.losses import functions
from dora_rl.trainer.losses.functions import PER_GROUP, GroupAdvantage, GroupScores
from dora_rl.trainer.losses.inputs import LossFunction, LossInputs, LossOutput
from dora_rl.trainer.losses.recipes import fill, is_users_own, recipe_of
from dora_rl.types import UserError
from dora_rl.user_code import UserCodeError, load_object, one_line, place_in, place_of, require

FUNCTIONS: dict[str, LossFunction] = {
    "clipped": functions.clipped,
    "decoupled": functions.decoupled,
    "triplet": functions.triplet,
    "reinforce": functions.reinforce,
    "cispo": functions.cispo,
    "gspo": functions.gspo,
}
# What an advantage is given by name, where it has a place for it.
_OF_GROUP = ("lengths", "truncated")


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss ready to use: the function and options with every choice made.

    From losses per token to one number every aggregation is (Σ over tokens of weight·loss) /
    denominator, so that a stream of packs adds up exactly. The weight is known from the token's own
    sequence; the denominator is a count that is complete only at the end of the update. The learner
    sums numerators' gradients pack by pack and divides once.

        token_mean     Σ_i Σ_t l_it / Σ_i |y_i|
        sequence_mean  (1/N) Σ_i (1/|y_i|) Σ_t l_it
        constant       (1/N) Σ_i (1/C) Σ_t l_it       C = constant_tokens

    |y_i| counts the trained tokens of response i and N the responses, including those a correction
    masks and those whose advantage is zero. A response of several rows (`dora_rl.histories`) is
    one: |y_i| counts the tokens of them all.

    `zero_advantage_is_free` says that a sequence whose advantages are all zero adds nothing to the
    gradient, so its forward pass may be skipped.
    """

    function: LossFunction
    options: AlgorithmConfig
    group_advantage: GroupAdvantage | None  # None: it takes the whole batch
    zero_advantage_is_free: bool = True

    def numerator(self, loss_T: Tensor, inputs: LossInputs) -> Tensor:
        """A pack's part of the sum, before division by the denominator."""
        if self.options.aggregation == "sequence_mean":
            loss_T = loss_T / inputs.spread_T(inputs.response_tokens_S())
        return loss_T.sum()

    def denominator(self, num_tokens: int, num_sequences: int) -> float:
        """What the numerator of a whole update is divided by."""
        o = self.options
        assert o.aggregation and (o.aggregation != "constant" or o.constant_tokens)
        in_constants = num_sequences * (o.constant_tokens or 0)
        of = {"token_mean": num_tokens, "sequence_mean": num_sequences, "constant": in_constants}
        return float(of[o.aggregation])

    @property
    def needs_whole_batch(self) -> bool:
        """Advantages that are normalised over the batch cannot be computed on a stream."""
        return self.group_advantage is None and not self.by_turn

    @property
    def by_turn(self) -> bool:
        """Each turn of a response has an advantage of its own, from the group's alone."""
        return self.options.advantage == "turn"

    @property
    def needs_critic(self) -> bool:
        return self.options.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        return self.options.reference or self.options.kl_coef != 0.0

    @property
    def distils_in_advantage(self) -> bool:
        """Each sampled token's advantage has what the teacher says of it."""
        return bool(self.options.distill_coef) and self.options.distill_in == "advantage"

    @property
    def distils_in_loss(self) -> bool:
        """The divergence of whole distributions is a term of the loss."""
        return bool(self.options.distill_coef) and self.options.distill_in == "loss"

    @property
    def may_skip_zero_advantage(self) -> bool:
        o = self.options
        kl_in_loss = o.kl_coef != 0.0 and o.kl_in == "loss"
        more = self.needs_critic or kl_in_loss or o.entropy_coef != 0.0 or o.distill_coef
        return o.skip_zero_advantage and self.zero_advantage_is_free and not more


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


# -- of the user's own ----------------------------------------------------------------------------


def own_loss(name: str, args: Mapping[str, Any]) -> LossFunction:
    """It may return the losses per token alone."""
    function, args = _load(name, "algorithm.loss", args, given=2)

    def call(inputs: LossInputs, options: AlgorithmConfig) -> LossOutput:
        try:
            out = function(inputs, options, **args)
        except Exception as error:
            raise _raised("algorithm.loss", name, function, error) from error
        if isinstance(out, Tensor):
            out = LossOutput(out)
        if not isinstance(out, LossOutput) or out.loss_T.shape != inputs.logprobs_T.shape:
            raise UserCodeError(
                f"algorithm.loss '{name}' must return one loss per token, a tensor of shape "
                f"{tuple(inputs.logprobs_T.shape)}, or a LossOutput with it; not {_shown(out)}"
                f"{place_of(function)}"
            )
        if inputs.logprobs_T.requires_grad and not out.loss_T.requires_grad:
            raise UserCodeError(
                f"algorithm.loss '{name}' returns a loss without a gradient: compute it from "
                f"inputs.logprobs_T or inputs.entropy_T, and do not detach it{place_of(function)}"
            )
        return out

    update_wrapper(call, function)  # whoever finds a fault in its figures can say where it is
    return call


def own_advantage(name: str, args: Mapping[str, Any]) -> GroupAdvantage:
    """Called with the group's rewards, and with `lengths` (trained tokens) and `truncated` (cut off
    at the limit) of its responses where it has a place for them."""
    function, args = _load(name, "algorithm.advantage", args, given=1)
    known = [p for p in _OF_GROUP if p in inspect.signature(function).parameters]

    def call(scores: GroupScores) -> list[float]:
        more: dict[str, Any] = {p: list(getattr(scores, p)) for p in known}
        rewards = list(scores.rewards)
        try:
            out = [float(value) for value in function(list(rewards), **more, **args)]
        except Exception as error:
            raise _raised("algorithm.advantage", name, function, error) from error
        if len(out) != len(rewards) or not all(math.isfinite(value) for value in out):
            raise UserCodeError(
                f"algorithm.advantage '{name}' must return one finite number per response: "
                f"{len(rewards)} for the rewards {rewards}, not {out}{place_of(function)}"
            )
        return out

    return call


def _load(
    name: str, key: str, args: Mapping[str, Any], given: int
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function and its arguments, if it takes them and needs no others. It is called with
    `given` values by place."""
    function = load_object(name, Path("."), section="algorithm", key=key)
    require((callable(function), f"{key} '{name}' is not a function"))
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        raise UserError(f"'{name}' does not say what it takes; put a function around it") from None
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    require(
        (
            len(by_place) >= given or any(p.kind is p.VAR_POSITIONAL for p in parameters),
            f"'{name}' must take {given} values by place, and takes {len(by_place)}"
            f"{place_of(function)}",
        )
    )
    own = {
        p.name: p
        for p in parameters
        if p not in by_place[:given]
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and not (given == 1 and p.name in _OF_GROUP)
    }
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for word in args:
            require((own, f"{key}_args.{word}: '{name}' takes no arguments of its own"))
            choose(f"argument of '{name}' in {key}_args", word, own)
    for word in (p.name for p in own.values() if p.default is p.empty):
        require((word in args, f"'{name}' needs its argument {word}: set {key}_args.{word}"))
    return function, dict(args)


def _raised(key: str, name: str, function: Callable[..., Any], error: Exception) -> UserCodeError:
    return UserCodeError(f"{key} '{name}' raised {one_line(error)}{place_in(function, error)}")


def _shown(out: object) -> str:
    if isinstance(out, LossOutput):
        out = out.loss_T
    return f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
