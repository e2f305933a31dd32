"""The built-in tasks as prompt sources: `path = "dora_rl.data.tasks:Chains"`.

Never holds state. Invariant: `row(seed, index, split)` is a pure function of its arguments, and
rows of different splits are disjoint by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dora_rl.data import chains, sums
from dora_rl.data.chains import Split
from dora_rl.types import UserError

SPLITS = {
    "train": Split.TRAIN,
    "test": Split.HELDOUT,
    "eval": Split.HELDOUT,
    "validation": Split.HELDOUT,
    "heldout": Split.HELDOUT,
}


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
    """Running sums for models that read English; the options are those of `sums.SumSpec`.

    >>> Sums(num_steps_max=60).row(0, 5, "train").keys()
    dict_keys(['prompt', 'answer', 'difficulty', 'split'])
    """

    name, kind, problem_at = "sums", sums.SumSpec, staticmethod(sums.problem_at)
