"""Losses and advantages of the user's own: one function in a file, `path/to/file.py:name`.

Each has a table of arguments in the configuration (`algorithm.loss_args`, `.advantage_args`), which
is checked against its signature. Invariant: whatever it raises or returns wrongly is one line that
names it and the line of its code, and ends the run; another learner would only come to the same
place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import update_wrapper
from pathlib import Path
from typing import Any

from torch import Tensor

from dora_rl.config import AlgorithmConfig
from dora_rl.config.section import choose
from dora_rl.trainer.losses.advantages import GroupAdvantage, GroupScores
from dora_rl.trainer.losses.inputs import LossFunction, LossInputs, LossOutput
from dora_rl.types import UserError
from dora_rl.user_code import UserCodeError, load_object, one_line, place_in, place_of

# What an advantage is given by name, where it has a place for it.
_OF_GROUP = ("lengths", "truncated")


def own_loss(name: str, args: Mapping[str, Any]) -> LossFunction:
    """It may return the losses per token alone."""
    function = _load(name, "algorithm.loss")
    args = _checked(function, name, "algorithm.loss_args", args, given=2)

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
    function = _load(name, "algorithm.advantage")
    args = _checked(function, name, "algorithm.advantage_args", args, given=1)
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


def _load(name: str, key: str) -> Callable[..., Any]:
    function = load_object(name, Path("."), section="algorithm", key=key)
    if not callable(function):
        raise UserError(f"{key} '{name}' is not a function")
    return function


def _checked(
    function: Callable[..., Any], name: str, key: str, args: Mapping[str, Any], given: int
) -> dict[str, Any]:
    """The arguments, if the function takes them and needs no others. It is called with `given`
    values by place."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        raise UserError(f"'{name}' does not say what it takes; put a function around it") from None
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(by_place) < given and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UserError(
            f"'{name}' must take {given} values by place, and takes {len(by_place)}"
            f"{place_of(function)}"
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
            if not own:
                raise UserError(f"{key}.{word}: '{name}' takes no arguments of its own")
            choose(f"argument of '{name}' in {key}", word, own)
    for p in own.values():
        if p.default is p.empty and p.name not in args:
            raise UserError(f"'{name}' needs its argument {p.name}: set {key}.{p.name}")
    return dict(args)


def _raised(key: str, name: str, function: Callable[..., Any], error: Exception) -> UserCodeError:
    return UserCodeError(f"{key} '{name}' raised {one_line(error)}{place_in(function, error)}")


def _shown(out: object) -> str:
    if isinstance(out, LossOutput):
        out = out.loss_T
    return f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
