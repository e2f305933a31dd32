"""Code execution: the program in the completion, run in the sandbox against the row's tests.

The tests of a problem come in the shapes that the field's datasets use:

    ["assert f(1) == 2", ...]                       statements, each one test (MBPP)
    "def check(f): ..." + column entry_point        one test (HumanEval)
    {"inputs": [...], "outputs": [...]}             standard input and output (APPS, TACO, verl)
    {..., "fn_name": "f"}                           the same, as calls of a function
    [{"input": ..., "output": ...}, ...]            the same, one by one

Any of them may be JSON text. Never runs anything in this process: a program prints or answers, and
what it should have printed or answered is compared here. A program that fails, hangs or attacks
scores nothing; only tests that cannot be read, or a machine that cannot run programs, are errors
of the sample.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dora_rl.config import RewardConfig
from dora_rl.rewards.base import Reward, ScoreError, ScoreItem
from dora_rl.rewards.sandbox.box import Sandbox, SandboxLost
from dora_rl.rewards.sandbox.limits import End, Limits
from dora_rl.rewards.statements import Question, call_question, question

FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
MEBIBYTE = 1 << 20


def program_in(completion: str) -> str:
    """The last fenced block; without any fence, all of it."""
    blocks = FENCE.findall(completion)
    return blocks[-1] if blocks else completion


class CodeReward(Reward):
    """1 if all tests pass, otherwise 0; with `partial`, the share that passes.

    `timeout_s` of the section bounds all tests of a sample together: what has not run by then
    has not passed. `preamble` stands before every program (imports that a dataset takes as given).
    """

    def __init__(
        self,
        limits: RewardConfig,
        *,
        tests: str = "",
        partial: bool = False,
        tests_max: int = 64,
        tolerance: float = 0.0,
        preamble: str = "",
        wall_s: float = 10.0,
        cpu_s: float = 10.0,
        memory_mib: int = 512,
        processes_max: int = 32,
        import_paths: Sequence[str] = (),
        preload: Sequence[str] = (),
        allow_unsandboxed: bool = False,
    ) -> None:
        self.name = "code"
        self._timeout_s = limits.timeout_s
        self._column, self._tests_max = tests, tests_max
        self._partial, self._tolerance = partial, tolerance
        self._preamble = f"{preamble}\n" if preamble else ""
        self._limits: dict[str, Any] = {
            "cpu_s": cpu_s,
            "memory_bytes_max": memory_mib * MEBIBYTE,
            "memory_total_bytes_max": 2 * memory_mib * MEBIBYTE,
            "processes_max": processes_max,
        }
        self._wall_s = wall_s
        self.num_threads = min(limits.concurrent_max, os.cpu_count() or 1)
        self.sandbox = Sandbox(
            allow_unsandboxed=allow_unsandboxed, import_paths=import_paths, preload=preload
        )
        self.how = f"built-in; {self.sandbox.describe()}"

    def missing(self, columns: Collection[str]) -> list[str]:
        return [self._column] if self._column and self._column not in columns else []

    def close(self) -> None:
        self.sandbox.close()

    def score_one(self, item: ScoreItem) -> float | ScoreError:
        try:
            tests = problem_tests(item, self._column)[: self._tests_max]
            num_passed = self._num_passed(self._preamble + program_in(item.completion), tests)
        except BadTests as error:
            return ScoreError(str(error))
        except (SandboxLost, OSError) as error:
            return ScoreError(f"could not run the program ({error})")
        return num_passed / len(tests) if self._partial else float(num_passed == len(tests))

    def _num_passed(self, program: str, tests: Sequence[Test]) -> int:
        end_s = time.monotonic() + self._timeout_s
        questions = [_question(test) for test in tests if not isinstance(test, Exchange)]
        num_passed = self._num_right(program, questions, end_s) if questions else 0
        failed = num_passed < len(questions)
        for test in tests:
            if time.monotonic() >= end_s or (failed and not self._partial):
                break
            if isinstance(test, Exchange):
                passes = self._passes(program, test, end_s)
                num_passed += passes
                failed = failed or not passes
        return num_passed

    def _num_right(self, program: str, questions: Sequence[Question], end_s: float) -> int:
        """All questions in one run. Answers before a hang count; but only a program that comes to
        its end has answered all."""
        asks = [ask for one in questions for ask in one.asks]
        run = self.sandbox.run(program, asks=asks, limits=self._until(end_s))
        most = {End.OK: len(questions), End.TIME: len(questions) - 1, End.CPU: len(questions) - 1}
        place = num_right = 0
        for one in questions:
            num_right += one.holds(run.answers[place : place + len(one.asks)])
            place += len(one.asks)
        return min(num_right, most.get(run.end, 0))

    def _passes(self, program: str, test: Exchange, end_s: float) -> bool:
        run = self.sandbox.run(program, stdin=test.stdin, limits=self._until(end_s))
        return run.end is End.OK and same_output(run.stdout, test.stdout, self._tolerance)

    def _until(self, end_s: float) -> Limits:
        wall_s = max(0.1, min(self._wall_s, end_s - time.monotonic()))
        return Limits(wall_s=wall_s, **self._limits)


COLUMNS = ("tests", "test_list", "test_cases", "input_output", "test")


class BadTests(Exception):
    """This row's tests cannot be understood."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A whole run: what the program reads, and what it must print."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class Call:
    """The value of an expression, and what it may be."""

    code: str
    accepted: tuple[object, ...]


Test = str | Call | Exchange  # a statement passes unless it raises, in the program's own scope


def _question(test: str | Call) -> Question:
    return question(test) if isinstance(test, str) else call_question(test.code, test.accepted)


def problem_tests(item: ScoreItem, column: str = "") -> list[Test]:
    names = (column,) if column else COLUMNS
    name = next((name for name in names if item.columns.get(name)), None)
    found: object = item.columns[name] if name else None if column else item.answer
    if not found:
        raise BadTests(f"no tests; the row has none of {', '.join(names)}")
    if isinstance(found, str):
        found = _from_text(found)
    entry = item.columns.get("entry_point")
    if isinstance(found, str) and isinstance(entry, str) and entry.isidentifier():
        found = f"{found}\ncheck({entry})\n"
    return read_tests(found)


def _from_text(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_tests(found: object) -> list[Test]:
    if isinstance(found, str):
        return [found]
    if isinstance(found, Mapping):
        return _pairs(cast(Mapping[str, Any], found))
    if isinstance(found, Sequence) and found:
        return [test for entry in cast(Sequence[object], found) for test in read_tests(entry)]
    raise BadTests(f"tests are {type(found).__name__}; give statements, or inputs and outputs")


def _pairs(found: Mapping[str, Any]) -> list[Test]:
    if "inputs" in found and "outputs" in found:
        inputs, outputs = found["inputs"], found["outputs"]
        if len(inputs) != len(outputs):
            raise BadTests(f"{len(inputs)} inputs and {len(outputs)} outputs")
    elif "input" in found and "output" in found:
        inputs, outputs = [found["input"]], [found["output"]]
    else:
        raise BadTests(f"a test has {', '.join(map(str, found))}, not input and output")
    name = found.get("fn_name")
    pairs = zip(inputs, outputs, strict=True)
    if isinstance(name, str) and name:
        return [_call(name, given, wanted) for given, wanted in pairs]
    return [Exchange(_text(given), _text(wanted)) for given, wanted in pairs]


def _call(name: str, given: Any, wanted: Any) -> Call:
    """`fn_name` datasets list the arguments, and often wrap the result in a list of one."""
    arguments = ", ".join(map(repr, given if isinstance(given, Sequence) else [given]))
    method = f"Solution().{name}" if "." not in name else name
    code = f"({name} if {name.split('.')[0]!r} in globals() else {method})({arguments})"
    accepted = [wanted, wanted[0]] if isinstance(wanted, list) and len(wanted) == 1 else [wanted]
    return Call(code, tuple(accepted))


def _text(value: Any) -> str:
    """Some datasets keep input as a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def same_output(made: str, wanted: str, tolerance: float = 0.0) -> bool:
    """Equal but for space at line ends and the end; numbers within a relative tolerance."""
    rows = [[line.rstrip() for line in text.strip().splitlines()] for text in (made, wanted)]
    if rows[0] == rows[1]:
        return True
    if tolerance <= 0 or len(rows[0]) != len(rows[1]):
        return False
    words = [[word for line in lines for word in line.split()] for lines in rows]
    return len(words[0]) == len(words[1]) and all(
        _close(a, b, tolerance) for a, b in zip(*words, strict=True)
    )


def _close(made: str, wanted: str, tolerance: float) -> bool:
    if made == wanted:
        return True
    try:
        return math.isclose(float(made), float(wanted), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False
