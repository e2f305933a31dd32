"""Drafts of every kind, for tests of what becomes of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.engine.speculation import Speculation
from tests.kit.tiny_models import VOCAB

Truth = Callable[[Seq], Sequence[int]]


class AnyDrafts(Speculation):
    """Right for a while, or wrong, or stop tokens, or far too long, or from the index, or none.
    `truth` says what a request will draw: prompt and response."""

    def __init__(self, seed: int, truth: Truth) -> None:
        super().__init__(fixed=True)
        self._random, self._truth = random.Random(seed), truth

    def propose(self, seq: Seq, length: int) -> tuple[int, ...]:
        if length <= 0:
            return ()
        draw = self._random
        right = tuple(self._truth(seq)[len(seq.tokens) :])
        some = tuple(draw.randrange(VOCAB) for _ in range(length))
        stops = (*seq.stop_ids, draw.randrange(VOCAB))
        found: tuple[int, ...] = draw.choice(
            (
                right[:length],
                (*right[: draw.randint(0, 3)], *some),
                tuple(draw.choice(stops) for _ in range(length)),
                (*right, *some)[:200],  # all of it and more
                super().propose(seq, length),
                (),
            )
        )
        return found[:length]
