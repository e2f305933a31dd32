"""The built-in tasks as prompt sources: `path = "dora_rl.data.tasks:Chains"` or `…:Sums`.

Never holds state. Invariant: `row(seed, index, split)` is a pure function of its arguments, and
rows of different splits are disjoint by construction.

Chains have a file of their own. Running sums are for real language models, and their right answers
have a long tail. A problem is a list of numbers. The prompt, in plain English, wants them added one
at a time with every running total written down, so a right answer is as long as its list:

    answer      12 + 7 = 19
                19 + 30 = 49
                \\boxed{49}

The number of additions is log-normal: most problems take a few lines, a few take a hundred, and
the longest of a batch is many times its median. The split of a problem is a hash of its numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from dora_rl.data import chains
from dora_rl.data.chains import Split, draw_num_steps, hashed_split
from dora_rl.types import UserError
from dora_rl.user_code import require

SPLITS = {
    "train": Split.TRAIN,
    "test": Split.HELDOUT,
    "eval": Split.HELDOUT,
    "validation": Split.HELDOUT,
    "heldout": Split.HELDOUT,
}


QUESTION = (
    "Add these numbers from left to right, one at a time. Write one line for each addition, for "
    "example 12 + 7 = 19, and nothing else. Then put the final total in \\boxed{{}}.\n\n{numbers}"
)


@dataclass(frozen=True, slots=True)
class SumSpec:
    """How hard: additions are log-normal (median, sigma), rounded, clamped to 1..num_steps_max;
    the numbers are uniform from 1 to number_max."""

    num_steps_median: float = 4.0
    num_steps_sigma: float = 1.4
    num_steps_max: int = 96
    number_max: int = 99

    def __post_init__(self) -> None:
        median, most = self.num_steps_median, self.num_steps_max
        require(
            (most >= 1, f"sums: num_steps_max is {most}; give at least 1"),
            (
                1 <= median <= most,
                f"sums: num_steps_median is {median}; give 1 to num_steps_max ({most})",
            ),
            (
                self.num_steps_sigma >= 0,
                f"sums: num_steps_sigma is {self.num_steps_sigma}; give 0 or more",
            ),
            (self.number_max >= 9, f"sums: number_max is {self.number_max}; give at least 9"),
        )


@dataclass(frozen=True, slots=True)
class SumProblem:
    """`SumProblem((12, 7, 30))` takes two additions and has the answer "49"."""

    numbers: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        return len(self.numbers) - 1

    @property
    def text(self) -> str:
        return QUESTION.format(numbers=", ".join(map(str, self.numbers)))

    @property
    def answer(self) -> str:
        return str(sum(self.numbers))

    @property
    def split(self) -> Split:
        return hashed_split(",".join(map(str, self.numbers)), b"sums")


def sum_problem_at(spec: SumSpec, split: Split, seed: int, index: int) -> SumProblem:
    """The problem at a place of the endless stream; a function of its arguments alone."""
    rng = Random(f"sums/{split}/{seed}/{index}")
    num_numbers = 1 + draw_num_steps(
        spec.num_steps_median, spec.num_steps_sigma, spec.num_steps_max, rng
    )
    while True:  # the split restricts the numbers, never how many they are
        numbers = (1 + int(rng.random() * spec.number_max) for _ in range(num_numbers))
        if (problem := SumProblem(tuple(numbers))).split is split:
            return problem


class Task:
    """Makes the rows of one task; the options are those of its `kind`."""

    name: str
    kind: Callable[..., Any]
    problem_at: Callable[..., Any]

    def __init__(self, **options: int | float) -> None:
        self.spec = self.kind(**options)

    def row(self, seed: int, index: int, split: str) -> dict[str, object]:
        if split not in SPLITS:
            raise UserError(f"{self.name}: no split {split!r}; give one of {', '.join(SPLITS)}")
        problem = self.problem_at(self.spec, SPLITS[split], seed, index)
        return {
            "prompt": problem.text,
            "answer": problem.answer,
            "difficulty": problem.num_steps,
            "split": str(problem.split),
        }


class Chains(Task):
    """Digit chains; the options are those of `ChainSpec`.

    >>> Chains(num_digits=3).row(0, 5, "train").keys()
    dict_keys(['prompt', 'answer', 'difficulty', 'split'])
    """

    name, kind, problem_at = "chains", chains.ChainSpec, staticmethod(chains.problem_at)


class Sums(Task):
    """Running sums for models that read English; the options are those of `SumSpec`.

    >>> Sums(num_steps_max=60).row(0, 5, "train").keys()
    dict_keys(['prompt', 'answer', 'difficulty', 'split'])
    """

    name, kind, problem_at = "sums", SumSpec, staticmethod(sum_problem_at)
