"""The losses that the SDK names, as its documentation defines them: sums over tokens.

Each takes the log-probs of the targets and the tensors that came with them, of all data side by
side, and gives a sum per datum's tokens; nothing is divided by anything. Invariant: a loss is the
sum of those of its data, so a batch may come in any number of requests.

    cross_entropy         −Σ w·log p
    importance_sampling   −Σ r·A,  r = p/q
    ppo                   −Σ min(r·A, clip(r)·A)
    cispo                 −Σ sg(clip(r))·A·log p
    dro                   −Σ (A·log p − β/2·(log p − log q)²)
    gspo                  as ppo; each r has the geometric mean of its sequence's as its value
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dora_rl.tinker.messages import Datum
from dora_rl.types import UserError

Config: TypeAlias = Mapping[str, float]
Inputs: TypeAlias = Mapping[str, Tensor]
TARGETS, WEIGHTS, SAMPLED, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
LOW, HIGH, IN_RATIO = "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"
TARGETS_MAX = 256  # of one position


@dataclass(frozen=True, slots=True)
class Loss:
    """`needs` must come with each datum, `may` can; `config` are its numbers and their defaults
    (None: there is none, so it must be given)."""

    function: Callable[[Tensor, Inputs, Config, Sequence[int]], Tensor]
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    config: Mapping[str, float | None] = field(default_factory=dict)

    def configured(self, name: str, given: Mapping[str, float | str]) -> dict[str, float]:
        known = dict(self.config)
        for key, value in given.items():
            if key not in known:
                says = ", ".join(known) or "no keys"
                raise UserError(f"loss_fn_config of {name} has {says}, not '{key}'")
            if isinstance(value, str) or not math.isfinite(value):
                raise UserError(f"loss_fn_config of {name}: '{key}' must be a finite number")
            known[key] = value
        missing = [key for key, value in known.items() if value is None]
        if missing:
            raise UserError(f"loss_fn_config of {name} needs '{missing[0]}'")
        return {key: float(value) for key, value in known.items() if value is not None}


def _cross_entropy(logprobs: Tensor, given: Inputs, config: Config, _: Sequence[int]) -> Tensor:
    return -(logprobs * given[WEIGHTS]).sum()


def _ratio(logprobs: Tensor, given: Inputs) -> Tensor:
    return torch.exp(logprobs - given[SAMPLED])


def _importance_sampling(
    logprobs: Tensor, given: Inputs, config: Config, _: Sequence[int]
) -> Tensor:
    return -(_ratio(logprobs, given) * given[ADVANTAGES]).sum()


def _clipped(ratio: Tensor, given: Inputs, config: Config) -> Tensor:
    """Bounds of a token go before those of the request."""
    low = given[LOW] if LOW in given else ratio.new_tensor(config[LOW])
    high = given[HIGH] if HIGH in given else ratio.new_tensor(config[HIGH])
    return torch.clamp(ratio, low, high)


def _smaller(ratio: Tensor, given: Inputs, config: Config) -> Tensor:
    advantages = given[ADVANTAGES]
    clipped = _clipped(ratio, given, config) * advantages
    return -torch.min(ratio * advantages, clipped).sum()


def _ppo(logprobs: Tensor, given: Inputs, config: Config, _: Sequence[int]) -> Tensor:
    return _smaller(_ratio(logprobs, given), given, config)


def _cispo(logprobs: Tensor, given: Inputs, config: Config, _: Sequence[int]) -> Tensor:
    weight = _clipped(_ratio(logprobs, given), given, config).detach()
    return -(weight * logprobs * given[ADVANTAGES]).sum()


def _dro(logprobs: Tensor, given: Inputs, config: Config, _: Sequence[int]) -> Tensor:
    square = (logprobs - given[SAMPLED]) ** 2
    return -(logprobs * given[ADVANTAGES] - 0.5 * config["beta"] * square).sum()


def _gspo(logprobs: Tensor, given: Inputs, config: Config, lengths: Sequence[int]) -> Tensor:
    """The value of a sequence's ratio, with the gradient of each token's own log-prob."""
    counts = torch.tensor(lengths, device=logprobs.device)
    owner = torch.repeat_interleave(counts)
    marked = (given[IN_RATIO] != 0).to(logprobs.dtype)
    gaps = (logprobs.detach() - given[SAMPLED]) * marked
    zeros = logprobs.new_zeros(len(lengths))
    sums, numbers = zeros.index_add(0, owner, gaps), zeros.index_add(0, owner, marked)
    mean = (sums / numbers.clamp(min=1))[owner]
    return _smaller(torch.exp(mean + logprobs - logprobs.detach()), given, config)


_OF_POLICY = (TARGETS, SAMPLED, ADVANTAGES)
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(_cross_entropy, (TARGETS, WEIGHTS)),
    "importance_sampling": Loss(_importance_sampling, _OF_POLICY),
    "ppo": Loss(_ppo, _OF_POLICY, (LOW, HIGH), {LOW: 0.8, HIGH: 1.2}),
    "cispo": Loss(_cispo, _OF_POLICY, (LOW, HIGH), {LOW: 0.0, HIGH: 4.0}),
    "dro": Loss(_dro, _OF_POLICY, config={"beta": 0.05}),
    "gspo": Loss(_gspo, (*_OF_POLICY, IN_RATIO), (LOW, HIGH), {LOW: None, HIGH: None}),
}


def loss_named(name: str) -> Loss:
    if name not in LOSSES:
        hint = "; give forward_backward_custom a function" * (name == "custom")
        raise UserError(f"there is no loss '{name}' here, but {', '.join(LOSSES)}{hint}")
    return LOSSES[name]


def check_data(data: Sequence[Datum], name: str, vocab: int, tokens_max: int) -> None:
    """Raise unless the loss can be computed of all, so that no pass stops in the middle."""
    if not data:
        raise UserError("the request has no data")
    for index, datum in enumerate(data):
        _check_datum(datum, name, index, vocab, tokens_max)
        if set(datum.inputs) != set(data[0].inputs):
            raise UserError(f"datum {index} has other loss_fn_inputs than datum 0")


def _check_datum(datum: Datum, name: str, index: int, vocab: int, tokens_max: int) -> None:
    loss, where, count = loss_named(name), f"datum {index}", len(datum.token_ids)
    if not 0 < count <= tokens_max:
        raise UserError(f"{where} has {count} tokens; 1 to {tokens_max} fit this model")
    if datum.token_ids.min() < 0 or datum.token_ids.max() >= vocab:
        raise UserError(f"{where} has a token id outside of the vocabulary (0 to {vocab - 1})")
    for key in loss.needs:
        if key not in datum.inputs:
            raise UserError(f"{where}: {name} needs '{key}' in loss_fn_inputs")
    extra = sorted(set(datum.inputs) - {*loss.needs, *loss.may})
    if extra:
        raise UserError(f"{where}: {name} does not know '{extra[0]}' in loss_fn_inputs")
    shape = datum.inputs[TARGETS].shape
    wide = name == "cross_entropy" and len(shape) == 2 and 0 < shape[1] <= TARGETS_MAX
    if shape[:1] != (count,) or (len(shape) != 1 and not wide):
        more = f" or ({count}, K), K at most {TARGETS_MAX}" * (name == "cross_entropy")
        raise UserError(f"{where}: '{TARGETS}' has shape {shape}; ({count},){more} was expected")
    _check_values(datum, where, vocab)


def _check_values(datum: Datum, where: str, vocab: int) -> None:
    targets = datum.inputs[TARGETS]
    if targets.dtype != np.int64 or targets.min() < 0 or targets.max() >= vocab:
        raise UserError(f"{where}: '{TARGETS}' must be token ids of the vocabulary, as int64")
    for key, values in datum.inputs.items():
        if values.shape != targets.shape:
            raise UserError(
                f"{where}: '{key}' has shape {values.shape}, '{TARGETS}' has {targets.shape}"
            )
        if not np.isfinite(values).all():
            raise UserError(f"{where}: '{key}' has a value that is not finite")


def side_by_side(data: Sequence[Datum], device: torch.device) -> dict[str, Tensor]:
    """The float tensors of all data, flat."""
    return {
        key: torch.from_numpy(
            np.concatenate([datum.inputs[key].ravel() for datum in data]).astype(np.float32)
        ).to(device)
        for key in sorted(data[0].inputs)
        if key != TARGETS
    }
