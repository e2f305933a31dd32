"""A tool task: work out an expression with a pocket calculator that does one operation at a time.

As on a pocket calculator, an expression is read from left to right. The policy ends a turn with
"?" to use the tool, and ends the episode with "=" and the answer:

    prompt        47+86-9*3\\n
    policy        47+86?            environment  133\\n
    policy        133-9?            environment  124\\n
    policy        124*3?            environment  372\\n
    policy        =372

The reward is 1 for the right answer and 0 otherwise, at the end. The tool is deterministic and
holds no state beyond the row's answer. Invariant: training and held-out expressions are disjoint;
the split is a hash of the expression.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from dora_rl.envs.base import Environment, Observation, Row, Turn
from dora_rl.types import UserError

CALL = re.compile(r"(\d{1,4})([+*-])(\d{1,4})\?")
ANSWER = re.compile(r"=(\d{1,4})")
RESULT_MAX = 999
HELDOUT_PER_MILLE = 100
TEST_SPLITS = ("test", "eval", "validation", "heldout")


class Calculator(Environment):
    """One episode of the tool task."""

    _answer = ""

    def reset(self, row: Row, seed: int) -> None:
        if row.answer is None:
            raise UserError("calculator: the row has no answer")
        self._answer = row.answer

    async def step(self, turn: Turn) -> Observation:
        if (call := CALL.fullmatch(turn.text)) is not None:
            result = operate(int(call[1]), call[2], int(call[3]))
            return Observation("!\n" if result is None else f"{result}\n")
        if turn.text.endswith("?"):
            return Observation("!\n")  # not a call that the tool understands
        answer = ANSWER.fullmatch(turn.text.strip())
        return Observation(
            reward=float(answer is not None and answer[1] == self._answer), done=True
        )


def operate(left: int, sign: str, right: int) -> int | None:
    """One key press; None where the display has no room for the result."""
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return result if 0 <= result <= RESULT_MAX else None


@dataclass(frozen=True, slots=True)
class Expression:
    """`Expression(47, (("+", 86), ("-", 9)))` is 47+86-9."""

    first: int
    rest: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        return f"{self.first}" + "".join(f"{sign}{number}" for sign, number in self.rest)

    def results(self) -> Iterator[tuple[int, str, int, int | None]]:
        """Left, sign, right and result of every operation, in order."""
        left: int | None = self.first
        for sign, right in self.rest:
            assert left is not None
            result = operate(left, sign, right)
            yield left, sign, right, result
            left = result

    @property
    def answer(self) -> int:
        *_, (_, _, _, result) = self.results()
        assert result is not None
        return result

    @property
    def held_out(self) -> bool:
        digest = hashlib.blake2b(self.text.encode(), digest_size=8, person=b"calculator").digest()
        return int.from_bytes(digest, "big") % 1000 < HELDOUT_PER_MILLE


def draw_expression(num_operations: int, rng: Random) -> Expression:
    """Numbers up to 99 whose every intermediate result fits the display."""
    first = value = int(rng.random() * 100)
    rest: list[tuple[str, int]] = []
    while len(rest) < num_operations:
        sign = "+-*"[int(rng.random() * 3)]
        number = int(rng.random() * (10 if sign == "*" else 100))
        if (result := operate(value, sign, number)) is not None:
            rest.append((sign, number))
            value = result
    return Expression(first, tuple(rest))


class Expressions:
    """The prompts of the task: `path = "dora_rl.envs.calculator:Expressions"`."""

    def __init__(self, num_operations_max: int = 4) -> None:
        if not 1 <= num_operations_max <= 9:
            raise UserError(f"calculator: num_operations_max is {num_operations_max}; give 1 to 9")
        self.num_operations_max = num_operations_max

    def expression(self, seed: int, index: int, split: str) -> Expression:
        """A function of its arguments alone."""
        rng = Random(f"calculator/{split}/{seed}/{index}")
        num_operations = 1 + int(rng.random() * self.num_operations_max)
        while True:
            expression = draw_expression(num_operations, rng)
            if expression.held_out == (split in TEST_SPLITS):
                return expression

    def row(self, seed: int, index: int, split: str) -> dict[str, object]:
        expression = self.expression(seed, index, split)
        return {
            "prompt": expression.text + "\n",
            "answer": str(expression.answer),
            "difficulty": len(expression.rest),
        }
