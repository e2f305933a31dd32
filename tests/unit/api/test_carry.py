"""Functions travel as source, with what they use; what cannot is refused by name."""

from __future__ import annotations

import functools
import logging
import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora_rl.api.carry import Carry
from dora_rl.types import UserError
from dora_rl.user_code import load_object

LOGGER = logging.getLogger("dora_rl.tests.carry")
LOCK = threading.Lock()


def travelled(function: Any, folder: Path) -> Any:
    """The function as another process finds it."""
    carry = Carry()
    name = carry.add(function)
    path = folder / "functions.py"
    path.write_text(carry.text())
    return load_object(f"{path}:{name}", folder, section="reward", key="reward.functions")


def importable(completion: str, answer: str) -> float:
    return float(completion == answer)


def test_a_function_of_a_module_is_imported(tmp_path: Path) -> None:
    carry = Carry()
    assert carry.add(importable) == "importable"
    assert f"from {__name__} import importable" in carry.text()
    assert travelled(importable, tmp_path) is importable


def test_a_lambda_is_the_one_of_several_on_a_line(tmp_path: Path) -> None:
    made = [lambda c: c + 1, lambda c: c - 1, lambda c: (lambda d: d * 2)(c)]  # fmt: skip
    for number, (function, result) in enumerate(zip(made, (8, 6, 14), strict=True)):
        folder = tmp_path / f"of_{number}"
        folder.mkdir()
        assert travelled(function, folder)(7) == result


def test_what_a_function_uses_travels_with_it(tmp_path: Path) -> None:
    bonus, words, pattern = 0.5, ["a", "b"], re.compile("A+", re.IGNORECASE)
    huge = math.inf

    class Scale:
        factor = 2

        def of(self, value: float) -> float:
            return value * self.factor

    def inner(text: str) -> int:
        return len(pattern.findall(text)) + (inner(text[1:]) if False else 0)

    def score(completion: str, answer: Fraction | LOCK = "a") -> float:  # type: ignore[valid-type]
        """Several lines
        of text, indented."""
        LOGGER.debug("scoring")
        if not math.isinf(huge) or Fraction(1, 2) != bonus:  # pytest rewrites an assert
            return 0.0
        return Scale().of(inner(completion)) + bonus + words.index(answer)  # type: ignore[arg-type]

    there = travelled(score, tmp_path)
    assert there is not score and there("aa b a", "b") == score("aa b a", "b") == 5.5
    assert there.__doc__ == score.__doc__


def test_a_decorator_of_a_script_travels_once(tmp_path: Path) -> None:
    """As a program would have it: the function of a script, which has a decorator."""
    script = tmp_path / "script.py"
    script.write_text(
        "import functools\n"
        "from dora_rl.api.carry import Carry\n"
        "def twice(f):\n"
        "    @functools.wraps(f)\n"
        "    def inner(*a):\n"
        "        return 2 * f(*a)\n"
        "    return inner\n"
        "def bare(f):\n"
        "    return lambda c: 3 * f(c)\n"
        "@twice\n"
        "def score(c):\n"
        "    return c + 1\n"
        "@bare\n"
        "def other(c):\n"
        "    return c\n"
        "carry = Carry()\n"
        "carry.add(score)\n"
        "scope = {}\n"
        "exec(carry.text(), scope)\n"
        "print(scope['score'](20))\n"
        "try:\n"
        "    Carry().add(other)\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "42"
    assert second.startswith("other is decorated") and "file.py:name" in second


def test_one_name_for_two_things_is_refused() -> None:
    def made(bonus: float) -> Callable[[float], float]:
        return lambda completion: completion + bonus

    carry = Carry()
    assert carry.add(made(1.0)) == "lambda_1"
    assert carry.add(made(1.0)) == "lambda_2"  # another function that uses an equal value
    with pytest.raises(UserError, match="a lambda uses 'bonus', and so does another function"):
        carry.add(made(2.0))


class Callable_:
    def __call__(self, completion: str) -> float:
        return 0.0

    def method(self, completion: str) -> float:
        return 0.0


handle = open(__file__)  # noqa: SIM115 - something that cannot travel


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda completion: LOCK.locked(), "a lambda uses 'LOCK', a lock, which cannot travel"),
        (lambda completion: handle.read(), "a lambda uses 'handle', a TextIOWrapper"),
        (Callable_(), "a Callable_ is neither a function nor a class"),
        (functools.partial(importable, answer="7"), "a partial is neither a function"),
        (eval("lambda completion: 1.0"), "its source cannot be read"),
        (len, "len is neither a function nor a class"),
    ],
)
def test_what_cannot_travel_is_named(function: Any, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        Carry().add(function)


def test_a_file_that_has_changed_since_is_not_taken(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import linecache, pathlib\n"
        "from dora_rl.api.carry import Carry\n"
        "def score(c):\n"
        "    return c + 1\n"
        "here = pathlib.Path(__file__)\n"
        "here.write_text(here.read_text().replace('c + 1', 'c + 100'))\n"
        "linecache.checkcache()\n"
        "try:\n"
        "    Carry().add(score)\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert "define it again if its file has changed" in done.stdout


def test_a_module_beside_a_script_is_found_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def near(c):\n    return c + 0.5\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import beside\n"
        "from beside import near as nearby\n"
        "from dora_rl.api.carry import Carry\n"
        "def score(c):\n"
        "    return beside.near(c) + nearby(0)\n"
        "carry = Carry()\n"
        "carry.add(score)\n"
        "print(carry.text())\n"
    )
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    code = made.stdout + "\nprint(score(1))\n"
    away = tmp_path / "away"
    away.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=away
    )
    assert done.stdout == "2.0\n"


SCRIPT = """
import functools, sys, types
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar
from dora_rl.api.carry import Carry

def there(function):
    carry = Carry()
    name = carry.add(function)
    module = sys.modules["elsewhere"] = types.ModuleType("elsewhere")
    exec(carry.text(), vars(module))
    return getattr(module, name)

def says(function):
    try:
        there(function)
    except Exception as error:
        return str(error)
    return "taken"

"""


def said_by(lines: str, tmp_path: Path) -> list[str]:
    """What a script prints, whose functions have no importable home."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + lines)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_defaults_are_those_of_the_definition(tmp_path: Path) -> None:
    lines = """
made = [lambda c, k=k: c + k for k in range(3)]
for k in (10, 20):
    def score(c, é="é", *, k=k, words=[k], f=lambda v: v + k, name=functools.reduce): return c + k
    made.append(score)
print([there(one)(100) for one in made])
def changed(c, k=1): return c + k
changed.__defaults__, changed.calls = (5,), 7
print(there(changed)(100), there(changed).calls)
"""
    assert said_by(lines, tmp_path) == ["[100, 101, 102, 110, 120]", "105 7"]


def test_a_wrapper_that_no_source_shows_is_refused(tmp_path: Path) -> None:
    lines = """
def twice(f):
    @functools.wraps(f)
    def inner(*a): return 2 * f(*a)
    return inner
def bare(c): return c
doubled = twice(bare)
def uses(c): return doubled(c)
@twice
def marked(c): return c
print(there(bare)(1), there(marked)(1))
for one in (doubled, uses, twice(marked), marked.__wrapped__): print(says(one))
"""
    first, *refusals = said_by(lines, tmp_path)
    assert first == "1 2"
    assert [line.partition(", ")[0] for line in refusals] == [
        "bare is wrapped without a decorator",
        "bare is wrapped without a decorator",
        "marked is decorated",
        "marked is decorated",
    ]


def test_a_class_is_the_one_that_is_used_as_it_is_now(tmp_path: Path) -> None:
    lines = """
limit = 3
class Settings:
    alpha, other = 1.0, 2
    bound = limit
    _cache = {}
Settings.alpha, Settings.new = 0.5, [1]
limit = 4
if limit == 3:
    class Scorer:
        def score(self): return "first"
else:
    class Scorer:
        def score(self): return "second"
@dataclass
class Row:
    kind: ClassVar[str] = "row"
    value: int = 0
    _: KW_ONLY
    weight: int = 1
def used(): return Settings.alpha, Settings.bound, Settings.new, Scorer().score(), repr(Row(7))
print(there(used)() == used(), there(used)()[:3])
"""
    assert said_by(lines, tmp_path) == ["True (0.5, 3, [1])"]


def test_inner_annotations_and_operators(tmp_path: Path) -> None:
    lines = """
def score(c: str) -> float:
    def clean(text: str) -> str: return text.strip()
    return float(clean(c) == "a")
print(there(score)(" a "))
def near(c, k): return c - k
def relative(c):
    from .beside import near
    return near(c)
import linecache, pathlib
here = pathlib.Path(__file__)
here.write_text(here.read_text().replace("c - k", "c + k"))
linecache.checkcache()
print(says(near))
print(says(relative))
"""
    first, second, third = said_by(lines, tmp_path)
    assert first == "1.0" and "if its file has changed since" in second
    assert third.startswith("relative imports relatively")


class Missing(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 9


def test_values_travel_as_what_they_are(tmp_path: Path) -> None:
    half, limits, none = np.float64(0.5), [math.inf, {"a": re.compile("x")}], frozenset({1})
    place, counts = Path("a/b"), Missing()

    def used() -> Any:
        return half, limits, none, place

    got = travelled(used, tmp_path)()
    assert got == used() and type(got[0]) is np.float64
    with pytest.raises(UserError, match="a Missing, which cannot travel"):
        Carry().add(lambda: counts["b"])
