"""Code execution: programs are found in completions and scored against tests of many shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dora_rl.config import RewardConfig
from dora_rl.rewards.base import ScoreError, ScoreItem
from dora_rl.rewards.code import (
    CodeReward,
    Exchange,
    problem_tests,
    program_in,
    same_output,
)
from dora_rl.rewards.sandbox.box import Sandbox

DOUBLE = "```python\ndef double(x):\n    return 2 * x\n```"
ECHO = "Sure:\n```python\nprint(int(input()) * 2)\n```\nThat is it."


def item(completion: str, answer: str | None = None, **columns: object) -> ScoreItem:
    return ScoreItem("p", "p", completion, (), answer, dict(columns))


@pytest.fixture(scope="module")
def reward(sandbox: Sandbox) -> Iterator[CodeReward]:
    made = CodeReward(RewardConfig())
    yield made
    made.close()


@pytest.fixture(scope="module")
def partial(sandbox: Sandbox) -> Iterator[CodeReward]:
    # The program that hangs is busy: its time on a core ends it, however busy the machine is.
    made = CodeReward(RewardConfig(timeout_s=120), partial=True, wall_s=60, cpu_s=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n``` and ```python\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na", "a"),  # cut off by the token limit
        ("a = 1", "a = 1"),
    ],
)
def test_program_in(completion: str, program: str) -> None:
    assert program_in(completion) == program


@pytest.mark.parametrize(
    "columns",
    [
        {"tests": ["assert double(2) == 4", "assert double(0) == 0"]},
        {"test_list": ["assert double(2) == 4"]},
        {"tests": "assert double(2) == 4"},
        {"test": "def check(f):\n    assert f(2) == 4", "entry_point": "double"},
        {"input_output": json.dumps({"fn_name": "double", "inputs": [[2]], "outputs": [[4]]})},
        {"input_output": {"fn_name": "double", "inputs": [[2]], "outputs": [4]}},
    ],
)
def test_functions(reward: CodeReward, columns: dict[str, Any]) -> None:
    wrong = DOUBLE.replace("2 * x", "3 * x if x else 1")
    assert reward.score([item(DOUBLE, **columns), item(wrong, **columns)]) == [1.0, 0.0]


def test_method_of_a_solution_class(reward: CodeReward) -> None:
    code = "class Solution:\n    def double(self, x):\n        return 2 * x\n"
    tests = {"fn_name": "double", "inputs": [[2]], "outputs": [[4]]}
    assert reward.score([item(code, tests=tests)]) == [1.0]


@pytest.mark.parametrize(
    "columns",
    [
        {"tests": {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}},
        {"tests": json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})},
        {"test_cases": [{"input": "1\n", "output": "2"}, {"input": "2\n", "output": "4"}]},
    ],
)
def test_standard_input_and_output(reward: CodeReward, columns: dict[str, Any]) -> None:
    wrong = ECHO.replace("* 2", "+ 1")
    assert reward.score([item(ECHO, **columns), item(wrong, **columns)]) == [1.0, 0.0]


def test_tests_in_the_answer_as_verl_keeps_them(reward: CodeReward) -> None:
    answer = json.dumps({"inputs": ["3"], "outputs": ["6"]})
    assert reward.score([item(ECHO, answer)]) == [1.0]


def test_partial_and_a_hang_in_the_middle(partial: CodeReward) -> None:
    code = "n = int(input())\nwhile n == 2:\n    pass\nprint(n * 2)"
    cases = [{"input": str(n), "output": str(2 * n)} for n in (1, 2, 3)]
    assert partial.score([item(code, tests=cases)]) == [pytest.approx(2 / 3)]
    tests = ["assert double(1) == 2", "assert double(1) == 3"]
    assert partial.score([item(DOUBLE, tests=tests)]) == [0.5]


def test_programs_that_fail_score_nothing(reward: CodeReward) -> None:
    tests = ["assert True"]
    for code in ("def f(:", "1 / 0", "import os; os._exit(0)", "import sys; sys.exit()"):
        assert reward.score([item(code, tests=tests)]) == [0.0]


@pytest.mark.parametrize(
    "columns", [{}, {"tests": 3}, {"tests": {"inputs": ["1"], "outputs": []}}, {"tests": [{}]}]
)
def test_bad_tests_are_an_error_of_the_row(reward: CodeReward, columns: dict[str, Any]) -> None:
    (score,) = reward.score([item(ECHO, **columns)])
    assert isinstance(score, ScoreError)


def test_check_says_how_programs_are_held(reward: CodeReward) -> None:
    assert reward.how == f"built-in; {reward.sandbox.describe()}"


def test_only_a_good_end_counts(reward: CodeReward) -> None:
    leave = "print(int(input()) * 2, flush=True)\nimport os\nos._exit(0)"
    assert reward.score([item(leave, tests={"input": "1", "output": "2"})]) == [0.0]
    late = f"{DOUBLE[:-3]}import atexit, os\natexit.register(os._exit, 0)\n```"
    assert reward.score([item(late, tests=["assert double(2) == 4"])]) == [0.0]


def test_answers_before_a_hang_count_in_part(partial: CodeReward) -> None:
    code = "def f(n):\n    while n == 2: pass\n    return n"
    tests = [f"assert f({n}) == {n}" for n in (1, 3, 2)]
    assert partial.score([item(code, tests=tests)]) == [pytest.approx(2 / 3)]
    endless = "import atexit\ndef wait():\n    while True: pass\natexit.register(wait)\n"
    assert partial.score([item(f"{endless}{code}", tests=tests[:2])]) == [0.5]


def test_shapes() -> None:
    assert problem_tests(item("", tests=["a", {"input": ["1", "2"], "output": 3}])) == [
        "a",
        Exchange("1\n2", "3"),
    ]


def test_outputs_are_compared_fairly() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1\n2", "1 2")
    assert not same_output("0.33333", "0.33334")
    assert same_output("0.3333333 x", "0.3333334 x", tolerance=1e-6)
    assert not same_output("0.3333333 x", "0.3333334 y", tolerance=1e-6)
