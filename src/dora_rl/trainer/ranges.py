"""Which numbers make sense for a hyper-parameter, and the line that says so.

Never imports torch or pydantic. Invariant: the bounds of the sections in `dora_rl.config` are these
(a test compares them), so that a number is refused with the same line whether it stands in a file
or in options made by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dora_rl.types import UserError


@dataclass(frozen=True, slots=True)
class Range:
    """The finite numbers from `low` to `high`. With `or_zero` also 0, which switches it off."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    or_zero: bool = False

    def holds(self, value: float) -> bool:
        if self.or_zero and value == 0:
            return True
        over = value > self.low if self.low_open else value >= self.low
        under = value < self.high if self.high_open else value <= self.high
        return math.isfinite(value) and over and under

    def refuse(self, key: str, value: float, shown: object = None) -> str:
        """The line for a value that is not in it; `shown` where the value is one of several."""
        words = str(self) if math.isfinite(float(value)) else f"finite, {self}"
        return f"{key} = {value if shown is None else shown}: must be {words}"

    def __str__(self) -> str:
        zero = "0 (off) or " if self.or_zero else ""
        low = f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"
        high = f"below {self.high:g}" if self.high_open else f"at most {self.high:g}"
        ends = [low] * math.isfinite(self.low) + [high] * math.isfinite(self.high)
        return zero + (" and ".join(ends) or "a number")


ANY = Range()
NOT_NEGATIVE = Range(low=0)
POSITIVE = Range(low=0, low_open=True)
AT_LEAST_ONE = Range(low=1)
SHARE = Range(low=0, high=1)
BELOW_ONE = Range(low=0, high=1, high_open=True)

ALGORITHM = {
    "constant_tokens": AT_LEAST_ONE,
    "clip_low": SHARE,  # a ratio is never below 0
    "clip_high": NOT_NEGATIVE,
    "dual_clip": Range(low=1, low_open=True, or_zero=True),
    # Where two policies agree their ratio is 1, which every correction must leave alone.
    "token_ratio_max": AT_LEAST_ONE,
    "token_ratio_min": SHARE,
    "sequence_ratio_max": AT_LEAST_ONE,
    "sequence_ratio_min": SHARE,
    "geometric_ratio_max": AT_LEAST_ONE,
    "geometric_ratio_min": SHARE,
    "behaviour_ratio_max": Range(low=1, or_zero=True),
    "kl_coef": NOT_NEGATIVE,
    "entropy_coef": ANY,  # below 0 it is a penalty
    "temperature": NOT_NEGATIVE,
    "overlong_tokens_max": NOT_NEGATIVE,
    "overlong_buffer_tokens": NOT_NEGATIVE,
    "overlong_penalty": NOT_NEGATIVE,
    "gamma": SHARE,
    "gae_lambda": SHARE,
    "value_coef": NOT_NEGATIVE,
    "value_clip": NOT_NEGATIVE,
    "critic_lr": NOT_NEGATIVE,
}

TRAINER = {
    "lr": NOT_NEGATIVE,
    "betas": BELOW_ONE,
    "eps": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "warmup_updates": NOT_NEGATIVE,
    "num_updates": NOT_NEGATIVE,
    "lr_floor_ratio": SHARE,
    "grad_norm_max": NOT_NEGATIVE,
    "updates_per_step": AT_LEAST_ONE,
    "pack_tokens": NOT_NEGATIVE,
    "document_tokens_max": NOT_NEGATIVE,
    "threads": NOT_NEGATIVE,
    "logits_chunk_tokens": NOT_NEGATIVE,
    "lora_rank": NOT_NEGATIVE,
    "lora_alpha": POSITIVE,
    "lora_dropout": BELOW_ONE,
    "seed": ANY,
}


def check_ranges(section: str, options: object, ranges: Mapping[str, Range]) -> None:
    """One line for the first number that makes no sense; None is a choice left open."""
    for name, allowed in ranges.items():
        value = getattr(options, name)
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if number is not None and not allowed.holds(number):
                raise UserError(allowed.refuse(f"{section}.{name}", number, value))
