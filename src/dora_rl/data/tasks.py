"""The built-in tasks as prompt sources: `path = "dora_rl.data.tasks:Chains"`.

Never holds state. Invariant: `row(seed, index, split)` is a pure function of its arguments, and
rows of different splits are disjoint by construction.
"""

from __future__ import annotations

from dora_rl.data import sums
from dora_rl.data.chains import ChainSpec, Split, problem_at
from dora_rl.types import UserError

SPLITS = {
    "train": Split.TRAIN,
    "test": Split.HELDOUT,
    "eval": Split.HELDOUT,
    "validation": Split.HELDOUT,
    "heldout": Split.HELDOUT,
}


class Chains:
    """Digit chains; the options are those of `ChainSpec`.

    >>> Chains(num_digits=3).row(0, 5, "train").keys()
    dict_keys(['prompt', 'answer', 'difficulty', 'split'])
    """

    def __init__(self, **options: int | float) -> None:
        self.spec = ChainSpec(**options)  # pyright: ignore[reportArgumentType]

    def row(self, seed: int, index: int, split: str) -> dict[str, object]:
        problem = problem_at(self.spec, _split("chains", split), seed, index)
        return {
            "prompt": problem.text,
            "answer": problem.answer,
            "difficulty": problem.num_steps,
            "split": str(problem.split),
        }


class Sums:
    """Running sums for models that read English; the options are those of `sums.SumSpec`.

    >>> Sums(num_steps_max=60).row(0, 5, "train").keys()
    dict_keys(['prompt', 'answer', 'difficulty', 'split'])
    """

    def __init__(self, **options: int | float) -> None:
        self.spec = sums.SumSpec(**options)  # pyright: ignore[reportArgumentType]

    def row(self, seed: int, index: int, split: str) -> dict[str, object]:
        problem = sums.problem_at(self.spec, _split("sums", split), seed, index)
        return {
            "prompt": problem.text,
            "answer": problem.answer,
            "difficulty": problem.num_steps,
            "split": str(problem.split),
        }


def _split(task: str, name: str) -> Split:
    if name not in SPLITS:
        raise UserError(f"{task}: no split {name!r}; give one of {', '.join(SPLITS)}")
    return SPLITS[name]
