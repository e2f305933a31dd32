"""Running sums: right answers, disjoint splits, and a long tail by construction."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.data.chains import Split
from dora_rl.data.tasks import SumProblem, Sums, SumSpec, sum_problem_at
from dora_rl.rewards.base import ScoreItem
from dora_rl.types import UserError

SPEC = SumSpec()
# As the tokenizers of current models cut text: every digit alone, a word with the space before it.
PIECES = re.compile(r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+")


def solution(problem: SumProblem) -> str:
    """The right answer, worked out as the prompt wants it."""
    totals = pairwise(accumulate(problem.numbers))
    added = zip(totals, problem.numbers[1:], strict=True)
    lines = [f"{before} + {number} = {after}\n" for (before, after), number in added]
    return "".join(lines) + f"\\boxed{{{problem.answer}}}"


def test_the_worked_example_of_the_docstring() -> None:
    problem = SumProblem((12, 7, 30))
    assert solution(problem) == "12 + 7 = 19\n19 + 30 = 49\n\\boxed{49}"
    assert problem.answer == "49" and problem.num_steps == 2
    assert problem.text.endswith("\n\n12, 7, 30") and "\\boxed{}" in problem.text


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(Split))
def test_a_solution_is_right_and_rewarded(seed: int, index: int, split: Split) -> None:
    problem = sum_problem_at(SPEC, split, seed, index)
    assert problem == sum_problem_at(SPEC, split, seed, index)
    assert problem.split is split and 1 <= problem.num_steps <= SPEC.num_steps_max
    lines = solution(problem).splitlines()
    assert len(lines) == problem.num_steps + 1
    for line in lines[:-1]:
        a, b, total = map(int, re.findall(r"\d+", line))
        assert a + b == total
    assert lines[-1] == f"\\boxed{{{sum(problem.numbers)}}}"


def test_the_built_in_reward_takes_the_solution() -> None:
    math = pytest.importorskip("dora_rl.rewards.builtin").math
    pytest.importorskip("math_verify")
    problem = sum_problem_at(SPEC, Split.TRAIN, 0, 7)
    right = ScoreItem(problem.text, problem.text, solution(problem), answer=problem.answer)
    wrong = ScoreItem(problem.text, problem.text, "\\boxed{1}", answer=problem.answer)
    assert math()(right) == 1.0 and math()(wrong) == 0.0


@pytest.mark.parametrize("spoken_tokens", [0, 60])
def test_right_answers_have_a_long_tail(spoken_tokens: int) -> None:
    """Also where a model says a few words around its lines."""
    problems = [sum_problem_at(SPEC, Split.TRAIN, 0, index) for index in range(4000)]
    lengths = [spoken_tokens + len(PIECES.findall(solution(p))) + 1 for p in problems]
    assert np.percentile(lengths, 99) >= 8 * np.median(lengths)
    assert max(lengths) < 2048, "the longest right answer must fit the recipe"


def test_splits_share_no_problem() -> None:
    held_out = {sum_problem_at(SPEC, Split.HELDOUT, 0, index).numbers for index in range(2000)}
    training = {sum_problem_at(SPEC, Split.TRAIN, 1, index).numbers for index in range(2000)}
    assert not held_out & training


def test_rows_and_options() -> None:
    row = Sums(num_steps_median=2, num_steps_max=2).row(0, 3, "test")
    assert row["difficulty"] in (1, 2) and row["split"] == "heldout"
    with pytest.raises(UserError, match="sums: no split 'dev'"):
        Sums().row(0, 0, "dev")
    for wrong in ({"num_steps_max": 0}, {"num_steps_median": 200}, {"number_max": 3}):
        with pytest.raises(UserError, match=r"sums: \w+ is "):
            Sums(**wrong)
    with pytest.raises(UserError, match="num_steps_sigma"):
        Sums(num_steps_sigma=-1)
