"""Digit chains: the built-in task family, with checkable answers and long-tailed responses.

A problem is a window of digits and a number of steps. One step drops the first digit and appends
(first + last) mod 10. The prompt is the first line of a scratchpad; a full response counts down
line by line and ends with the final window:

    prompt      03:274\\n
    response    02:746\\n01:463\\n00:637\\n=637

A response is as long as its chain, and the number of steps is log-normal, so lengths have a long
tail. Everything is drawn on the fly from (seed, index); nothing here reads files or needs torch.

Invariant: training and held-out problems are disjoint, and so are all the problems that occur
inside their scratchpads. Each line `kk:digits` of a scratchpad is itself a prompt, and all lines
lead to the same final window; the split is a hash of that final window alone, so a scratchpad
never leaves its split. (Hence no held-out answer is ever the answer of a training problem.)
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from random import Random
from statistics import NormalDist
from typing import TypeAlias

from dora_rl.user_code import require

Window: TypeAlias = tuple[int, ...]

NUM_STEPS_LIMIT = 99  # the countdown has two places
HELDOUT_PER_MILLE = 100


class Split(StrEnum):
    """Which side of the fixed division a problem is on; it does not depend on any seed."""

    TRAIN = "train"
    HELDOUT = "heldout"


def draw_num_steps(median: float, sigma: float, num_steps_max: int, rng: Random) -> int:
    """Log-normal, rounded and clamped."""
    # Only rng.random() is promised to be the same in every Python version, hence the inverse.
    sigmas = NormalDist().inv_cdf(min(max(rng.random(), 1e-12), 1 - 1e-12))
    return min(max(round(median * math.exp(sigma * sigmas)), 1), num_steps_max)


@dataclass(frozen=True, slots=True)
class ChainSpec:
    """How hard: steps are log-normal (median, sigma), rounded, and clamped to 1..num_steps_max."""

    num_digits: int = 3
    num_steps_median: float = 3.0
    num_steps_sigma: float = 1.2
    num_steps_max: int = 60

    def __post_init__(self) -> None:
        median, most = self.num_steps_median, self.num_steps_max
        require(
            (
                self.num_digits >= 2,
                f"chains: num_digits is {self.num_digits}; give at least 2",
            ),
            (
                1 <= most <= NUM_STEPS_LIMIT,
                f"chains: num_steps_max is {most}; give 1 to {NUM_STEPS_LIMIT}",
            ),
            (
                1 <= median <= most,
                f"chains: num_steps_median is {median}; give 1 to num_steps_max ({most})",
            ),
            (
                self.num_steps_sigma >= 0,
                f"chains: num_steps_sigma is {self.num_steps_sigma}; give 0 or more",
            ),
        )

    def draw_num_steps(self, rng: Random) -> int:
        return draw_num_steps(self.num_steps_median, self.num_steps_sigma, self.num_steps_max, rng)


@dataclass(frozen=True, slots=True)
class Problem:
    """`Problem((2, 7, 4), 3)` has the prompt "03:274\\n" and the answer "637"."""

    window: Window
    num_steps: int

    @property
    def text(self) -> str:
        return line(self.window, self.num_steps)

    @property
    def answer(self) -> str:
        return digits(final_window(self.window, self.num_steps))

    @property
    def split(self) -> Split:
        return split_of(final_window(self.window, self.num_steps))


def digits(window: Window) -> str:
    return "".join(map(str, window))


def line(window: Window, num_steps: int) -> str:
    return f"{num_steps:02d}:{digits(window)}\n"


def advance(window: Window) -> Window:
    """One step: (2, 7, 4) becomes (7, 4, 6)."""
    return (*window[1:], (window[0] + window[-1]) % 10)


def final_window(window: Window, num_steps: int) -> Window:
    for _ in range(num_steps):
        window = advance(window)
    return window


@lru_cache(maxsize=65536)
def split_of(final: Window) -> Split:
    """The split of every problem that ends in this window."""
    return hashed_split(digits(final), b"chains")


def hashed_split(text: str, task: bytes) -> Split:
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=task).digest()
    drawn = int.from_bytes(digest, "big") % 1000
    return Split.HELDOUT if drawn < HELDOUT_PER_MILLE else Split.TRAIN


def draw_problem(spec: ChainSpec, split: Split, num_steps: int, rng: Random) -> Problem:
    """A problem with that many steps: the split restricts the window, never the length."""
    while True:
        window = tuple(int(rng.random() * 10) for _ in range(spec.num_digits))
        if (problem := Problem(window, num_steps)).split is split:
            return problem


def problem_at(spec: ChainSpec, split: Split, seed: int, index: int) -> Problem:
    """The problem at a place of the endless stream; a function of its arguments alone."""
    rng = Random(f"chains/{split}/{seed}/{index}")
    return draw_problem(spec, split, spec.draw_num_steps(rng), rng)


def reward(completion: str, answer: str) -> float:
    """1 if what follows the last "=" is the answer and nothing else, otherwise 0."""
    _, mark, given = completion.rpartition("=")
    return 1.0 if mark and given.strip() == answer else 0.0
