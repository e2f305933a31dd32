"""The tests of a programming problem, in the shapes that the field's datasets use.

    ["assert f(1) == 2", ...]                       statements, each one test (MBPP)
    "def check(f): ..." + column entry_point        one test (HumanEval)
    {"inputs": [...], "outputs": [...]}             standard input and output (APPS, TACO, verl)
    {..., "fn_name": "f"}                           the same, as calls of a function
    [{"input": ..., "output": ...}, ...]            the same, one by one

Any of them may be JSON text. Never runs anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dora_rl.rewards.base import ScoreItem

COLUMNS = ("tests", "test_list", "test_cases", "input_output", "test")


class BadTests(Exception):
    """This row's tests cannot be understood."""


@dataclass(frozen=True, slots=True)
class Statement:
    """Runs in the program's own scope; passes unless it raises."""

    code: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """A whole run: what the program reads, and what it must print."""

    stdin: str
    stdout: str


Test = Statement | Exchange


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
        return [Statement(found)]
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


def _call(name: str, given: Any, wanted: Any) -> Statement:
    """`fn_name` datasets list the arguments, and often wrap the result in a list of one."""
    arguments = ", ".join(map(repr, given if isinstance(given, Sequence) else [given]))
    target = f"Solution().{name}" if "." not in name else name
    accepted = [wanted, wanted[0]] if isinstance(wanted, list) and len(wanted) == 1 else [wanted]
    code = (
        f"_made = ({name} if {name.split('.')[0]!r} in globals() else {target})({arguments})\n"
        f"_made = list(_made) if isinstance(_made, tuple) else _made\n"
        f"assert any(_made == wanted for wanted in {accepted!r}), repr(_made)[:200]"
    )
    return Statement(code)


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
