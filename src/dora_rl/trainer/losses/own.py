"""Losses and advantages of the user's own: one function in a file, `path/to/file.py:name`.

Invariant: whatever it raises or returns wrongly is one line that names it, and ends the run;
another learner would only come to the same place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dora_rl.trainer.advantages import GroupAdvantage
from dora_rl.trainer.losses.inputs import LossFunction, LossInputs, LossOutput
from dora_rl.trainer.options import AlgorithmOptions
from dora_rl.types import UserError
from dora_rl.user_code import UserCodeError, load_object, one_line


def own_loss(name: str) -> LossFunction:
    """It may return the losses per token alone."""
    function = _load(name, "algorithm.loss")

    def call(inputs: LossInputs, options: AlgorithmOptions) -> LossOutput:
        try:
            out = function(inputs, options)
        except Exception as error:
            raise UserCodeError(f"algorithm.loss '{name}' raised {one_line(error)}") from error
        if isinstance(out, Tensor):
            out = LossOutput(out)
        if not isinstance(out, LossOutput) or out.loss_T.shape != inputs.logprobs_T.shape:
            raise UserCodeError(
                f"algorithm.loss '{name}' must return one loss per token, a tensor of shape "
                f"{tuple(inputs.logprobs_T.shape)}, or a LossOutput with it"
            )
        if inputs.logprobs_T.requires_grad and not out.loss_T.requires_grad:
            raise UserCodeError(
                f"algorithm.loss '{name}' returned a loss without a gradient; compute it from "
                "inputs.logprobs_T, without detach, .item() or torch.no_grad()"
            )
        return out

    return call


def own_advantage(name: str) -> GroupAdvantage:
    """Called with the group's rewards, and with its responses' lengths where it has a place."""
    function = _load(name, "algorithm.advantage")
    takes_lengths = "lengths" in inspect.signature(function).parameters

    def call(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
        more: dict[str, Any] = {"lengths": list(lengths)} if takes_lengths else {}
        try:
            out = [float(value) for value in function(list(rewards), **more)]
        except Exception as error:
            raise UserCodeError(f"algorithm.advantage '{name}' raised {one_line(error)}") from error
        if len(out) != len(rewards) or not all(math.isfinite(value) for value in out):
            raise UserCodeError(
                f"algorithm.advantage '{name}' must return one finite number per response: "
                f"{len(rewards)}, not {out}"
            )
        return out

    return call


def _load(name: str, key: str) -> Callable[..., Any]:
    function = load_object(name, Path("."), section="algorithm", key=key)
    if not callable(function):
        raise UserError(f"{key} '{name}' is not a function")
    return function
