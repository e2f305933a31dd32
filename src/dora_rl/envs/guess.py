"""A small text game: find a number; after every guess the game says where it lies.

    prompt     17-31:4\\n            from 17 to 31, four guesses
    policy     24?                  game  <\\n     it is smaller
    policy     20?                  game  >\\n     it is larger
    policy     22?                  (found: the reward is 1 and the episode ends)

Whoever always halves the range finds every number in time; whoever guesses at random within it
finds some. Anything that is not a guess ends the game without reward. Invariant: held-out games
have other bounds than training games.
"""

from __future__ import annotations

import re
from random import Random

from dora_rl.envs.base import Environment, Observation, Row, Turn
from dora_rl.types import UserError

GUESS = re.compile(r"(\d\d)\?")
TEST_SPLITS = ("test", "eval", "validation", "heldout")


class Guess(Environment):
    """One game."""

    _secret = _num_left = 0

    def reset(self, row: Row, seed: int) -> None:
        if row.answer is None or "guesses" not in row.columns:
            raise UserError("guess: the row needs an answer and a column guesses")
        self._secret, self._num_left = int(row.answer), int(row.columns["guesses"])

    async def step(self, turn: Turn) -> Observation:
        guess = GUESS.fullmatch(turn.text)
        self._num_left -= 1
        if guess is not None and int(guess[1]) == self._secret:
            return Observation(reward=1.0, done=True)
        if guess is None or not self._num_left:
            return Observation(reward=0.0, done=True)
        return Observation("<\n" if self._secret < int(guess[1]) else ">\n")


class Games:
    """The prompts of the game: `path = "dora_rl.envs.guess:Games"`.

    A game of n guesses has 2^n - 1 numbers, as many as halving finds for certain.
    """

    def __init__(self, guesses_min: int = 2, guesses_max: int = 5) -> None:
        if not 1 <= guesses_min <= guesses_max <= 6:
            raise UserError("guess: give 1 <= guesses_min <= guesses_max <= 6")
        self.guesses_min, self.guesses_max = guesses_min, guesses_max

    def row(self, seed: int, index: int, split: str) -> dict[str, object]:
        rng = Random(f"guess/{split}/{seed}/{index}")
        guesses = self.guesses_min + int(rng.random() * (self.guesses_max + 1 - self.guesses_min))
        width = 2**guesses - 1
        while True:
            low = int(rng.random() * (101 - width))
            # Held out are 07, 27, 47, 67 and 87: a tiny model must have seen a digit in its place
            # (as in 17 and 37) to read it.
            if (low % 20 == 7) == (split in TEST_SPLITS):
                break
        return {
            "prompt": f"{low:02d}-{low + width - 1:02d}:{guesses}\n",
            "answer": str(low + int(rng.random() * width)),
            "guesses": guesses,
            "difficulty": guesses,
        }
