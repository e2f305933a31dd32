"""Demonstrations of the chains task: right responses, and ones that are flawed on purpose.

What `warm_start.py` imitates. Invariant: a demonstration, with every problem inside it, stays in
the training split; the same seed gives the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from dora_rl.data.chains import (
    ChainSpec,
    Problem,
    Split,
    Window,
    advance,
    digits,
    draw_problem,
    line,
)

# Every character that a prompt or a response can hold, in the order of their token ids.
ALPHABET = "0123456789:=\n"


def response_tokens_max(spec: ChainSpec) -> int:
    """Length of the longest right response: its lines, the answer, the end of sequence."""
    return spec.num_steps_max * (spec.num_digits + 4) + spec.num_digits + 2


def solution(problem: Problem, disturb: Callable[[Window, int], Window] | None = None) -> str:
    """The full right response: the scratchpad down to 00, then the answer. `disturb` may put
    another window in the place of each, and the scratchpad goes on from there."""
    window, lines = problem.window, list[str]()
    for num_steps in reversed(range(problem.num_steps)):
        window = advance(window)
        window = disturb(window, num_steps) if disturb else window
        lines.append(line(window, num_steps))
    return "".join(lines) + "=" + digits(window)


@dataclass(frozen=True, slots=True)
class Flaws:
    """What is wrong, on purpose, with the later demonstrations of a warm start.

    A guess skips the scratchpad and writes a random window. Demonstrators guess often on prompts
    whose last digit is at least `hasty_digit_min` and sometimes on the others. Because the habit
    hangs on the prompt, the greedy policy guesses too, on that share of the prompts, and yet every
    prompt keeps both kinds of responses, which is what reinforcement learning can sharpen. A slip
    writes a wrong digit and goes on from there.
    """

    hasty_digit_min: int = 4
    guess_prob_hasty: float = 0.75
    guess_prob_calm: float = 0.25
    slip_prob: float = 0.02


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and a response to imitate; both stay inside the training split."""

    prompt: str
    response: str


def demonstration(problem: Problem, flaws: Flaws | None, rng: Random) -> Demonstration:
    """The solution, or with flaws a guess or a solution with slips."""
    if flaws is None:
        return Demonstration(problem.text, solution(problem))
    hasty = problem.window[-1] >= flaws.hasty_digit_min
    if rng.random() < (flaws.guess_prob_hasty if hasty else flaws.guess_prob_calm):
        spec = ChainSpec(num_digits=len(problem.window))
        guess = draw_problem(spec, problem.split, 1, rng)
        return Demonstration(problem.text, "=" + guess.answer)

    def disturb(window: Window, num_steps: int) -> Window:
        return slip(window, num_steps, rng) if rng.random() < flaws.slip_prob else window

    return Demonstration(problem.text, solution(problem, disturb))


def slip(window: Window, num_steps: int, rng: Random) -> Window:
    """Another last digit, one from which the rest of the scratchpad stays in its split."""
    split = Problem(window, num_steps).split
    wrong = [(*window[:-1], digit) for digit in range(10) if digit != window[-1]]
    inside = [other for other in wrong if Problem(other, num_steps).split is split]
    return inside[int(rng.random() * len(inside))] if inside else window


def demonstrations(
    spec: ChainSpec,
    seed: int,
    num_total: int,
    flawed_frac: float = 0.25,
    uniform_frac: float = 0.1,
    flaws: Flaws | None = None,
) -> Iterator[Demonstration]:
    """`num_total` training demonstrations: first the clean ones, then the flawed share.

    `uniform_frac` of them draw the number of steps uniformly, so that long chains are learned too.
    """
    num_clean = round(num_total * (1 - flawed_frac))
    for index in range(num_total):
        rng = Random(f"chains/demonstrations/{seed}/{index}")
        if rng.random() < uniform_frac:
            num_steps = 1 + int(rng.random() * spec.num_steps_max)
        else:
            num_steps = spec.draw_num_steps(rng)
        problem = draw_problem(spec, Split.TRAIN, num_steps, rng)
        yield demonstration(problem, None if index < num_clean else flaws or Flaws(), rng)
