"""Statement tests taken apart: what goes in, what is judged outside, and that it is judged as
Python would judge it."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from dora_rl.rewards.sandbox.box import Sandbox
from dora_rl.rewards.sandbox.limits import Answer, Ask
from dora_rl.rewards.sandbox.values import BadValue, NotPlain, Opaque, decode, encode
from dora_rl.rewards.statements import call_question, question

# Each with a program that is right and one that is wrong; 739 must stay outside.
JUDGED_OUTSIDE = {
    "assert f(1) == 739": ("return 739", "return 738"),
    "assert 739 == f(1), 'no'": ("return 739.0", "return '739'"),
    "assert f(1) != 739": ("return 1", "return 739"),
    "assert abs(f(1) - 739.5) < 1e-6": ("return 739.5", "return 739.6"),
    "assert round(f(1), 2) == 739.12": ("return 739.123", "return 739.2"),
    "assert math.isclose(f(1), 739.1, rel_tol=1e-3)": ("return 739.2", "return 749"),
    "import math\nassert math.isclose(f(1), 739)": ("return 739", "return 740"),
    "assert f(1) in (739, 740)": ("return 740", "return 741"),
    "assert 739 in f(1)": ("return {739}", "return [1]"),
    "assert 738 < f(1) <= 739": ("return 739", "return 738"),
    "assert f(1) is None": ("return None", "return 0"),
    "assert f(1) is True": ("return True", "return 1"),
    "assert not f(1)": ("return []", "return [0]"),
    "assert f(1) and f(2) == 739": ("return 739", "return 0"),
    "assert f(1) == 1 or f(2) == 739": ("return 739", "return 2"),
    "assert set(f(1)) == {739, 2}": ("return [2, 739, 2]", "return [2]"),
    "assert list(f(1)) == [739]": ("yield 739", "yield 738"),
    "assert sorted(f(1)) == sorted([739, 2])": ("return (739, 2)", "return (739,)"),
    "assert sorted(f(1), reverse=True) == [739, 1]": ("yield from (1, 739)", "yield 1"),
    "assert max(f(1), key=abs) == -739": ("yield from (1, -739)", "yield 1"),
    "assert f(1) == sorted(['739', ''], key=len)": ("return ['', '739']", "return ['739', '']"),
    "assert ', '.join(f(1)) == 'a, 739'": ("yield from ('a', '739')", "yield 'a'"),
    "assert f(1) == 739 / 2": ("import decimal; return decimal.Decimal('369.5')", "return 369"),
    "assert len(f(1)) == 739 - 737": ("return 'ab'", "return 'abc'"),
    "assert f(1) == (739, [1, {'a': None}], {b'x'}, 1.5, 2j)": (
        "return (739, [1, {'a': None}], {b'x'}, 1.5, 2j)",
        "return [739, [1, {'a': None}], {b'x'}, 1.5, 2j]",
    ),
    "assert (f(1), f(2)) == (739, 739)": ("return 739", "return 1"),
    "assert f(1)[0] == 739 and f(1)[-1] == 739": ("return [739]", "return [1]"),
    "assert f(1) == '739 a'.split()": ("return ['739', 'a']", "return ['739']"),
    "assert isinstance(f(1), (list, tuple))": ("return [739]", "return {739}"),
    "assert type(f(1)) is int": ("return 739", "return True"),
    "assert f(1) == 739 ** 2 % 1000": ("return 121", "return 1"),
    "expected = [739]\nassert f(1) == expected": ("return [739]", "return [1]"),
    "x = [2, 1]\nf(x)\nassert x == [1, 2, 739]": ("x.sort(); x.append(739)", "x.sort()"),
    "r = f(1)\nassert r == 739\nassert r > 0": ("return 739", "return 740"),
    "for x, y in [(1, 739), (2, 740)]:\n    assert f(x) == y": (
        "return 738 + x",
        "return 739",
    ),
    "for n in range(2):\n    assert f(n) == n + 739": ("return x + 739", "return x"),
    "cases = [(1, 739)]\nfor x, y in cases:\n    assert f(x) == y": ("return 739", "return 1"),
    "M = {'author': 'x'}\n\ndef check(candidate):\n    'doc'\n    assert candidate(1) == 739\n"
    "    assert True, 'x'\n    for n in range(2):\n        assert candidate(n) == 739\ncheck(f)": (
        "return 739",
        "return 739 * x",
    ),
    "def check(candidate):\n    assert candidate(x=1) == 739\ncheck(Solution().g)": (
        "return 739",
        "return 1",
    ),
    "assert sum(1, 2) == 739": ("return 739", "return 3"),
}
PROGRAM = """
def f(x):
    BODY
class Solution:
    def g(self, x):
        BODY
def sum(*args):
    return f(0)
"""


def program(body: str) -> str:
    # `sum` is a program's own function only where it is what is tested.
    return PROGRAM.replace("BODY", body)


@pytest.mark.parametrize("test", list(JUDGED_OUTSIDE))
def test_judged_outside_as_python_would(test: str, sandbox: Sandbox) -> None:
    found = question(test)
    if "x == [1, 2" not in test:
        assert found.outside
    assert not [ask for ask in found.asks if "739" in ask.code or "740" in ask.code]
    for body, right in zip(JUDGED_OUTSIDE[test], (True, False), strict=True):
        run = sandbox.run(program(body), asks=found.asks)
        assert found.holds(run.answers) is right, run
    # What it raises is wrong, and what never came.
    assert not found.holds([Answer(False)] * len(found.asks))
    assert not found.holds([None] * len(found.asks))


@pytest.mark.parametrize(
    ("test", "goes_in"),
    [
        ("assert f([1] * 3, k='a') == 5", ["f([1] * 3, k='a')"]),
        ("assert decode(encode('a')) == 'a'", ["decode(encode('a'))"]),
        ("assert longest([Pair(5, 24)], 4) == 3", ["longest([Pair(5, 24)], 4)"]),
        ("assert max(1, 2) == 2", ["max(1, 2)"]),
        ("assert f(1) == max(1, 2)", ["f(1)"]),
        ("R = [7]\nassert f(1) == R[0]", ["f(1)"]),
        ("assert True", ["pass"]),
    ],
)
def test_what_goes_in(test: str, goes_in: list[str]) -> None:
    found = question(test)
    assert found.outside and [ask.code for ask in found.asks] == goes_in


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1) == date(2020, 1, 1)",
        "assert np.allclose(f(1), [2])",
        "assert all(f(x) == 1 for x in [1, 2])",
        "assert isinstance(f(1), Klass)",
        "R = [7]\nassert f(1) == {r for r in R}",
        "with raises(ValueError):\n    f(1)",
        "if f(1) != 2:\n    raise AssertionError",
        "assert f(1) == 'x' * 10 ** 9",
        "assert (f(1) - 3).real == 0",
        "def check(f, *more):\n    assert f(1) == 2\ncheck(g)",
        "this is no Python",
    ],
)
def test_what_is_the_programs_own_word(test: str) -> None:
    assert not question(test).outside


def test_every_call_is_made_once() -> None:
    found = question("assert sorted([f(1) - 1, (not f(2)) + 1], reverse=True)[0] == abs(f(3) - 2)")
    codes = [ask.code for ask in found.asks]
    assert len(codes) == len(set(codes))


def test_names_of_a_check_function_do_not_change_the_programs(sandbox: Sandbox) -> None:
    test = "def check(c):\n    n = c(1)\n    assert n == 2\n    assert c(2) == 3\ncheck(f)"
    run = sandbox.run("n = 1\ndef f(x): return x + n", asks=question(test).asks)
    assert question(test).holds(run.answers)


@pytest.mark.parametrize(
    "value",
    [
        "%1000000000d",
        "a" * 1_000_000,
        Opaque("Liar", True),
        float("inf"),
        float("nan"),
        1 << 1_000_000,
        [[]] * 100,
        None,
    ],
    ids=["format", "text", "object", "infinity", "nan", "huge", "lists", "none"],
)
def test_operations_on_hostile_values_end_soon_and_fail(value: object) -> None:
    for condition in (
        "f(1) % 3 == 7",
        "f(1) * 1000000 == 7",
        "f(1) ** 100000 == 7",
        "abs(f(1) - 3) < 1",
        "round(3 - f(1)) == 1",
        "round(1.5, f(1)) == 7",
        "f(1) < 0",
    ):
        assert not question(f"assert {condition}").holds([Answer(True, value)])


COLLIDING = [number * ((1 << 61) - 1) for number in range(100)]


@pytest.mark.parametrize(
    ("test", "fair", "costly"),
    [
        ("assert len(sum(f(1), [])) % 100 == 0", [[1] * 100] * 3, [[1] * 100] * 1200),
        ("assert len(sum(f(1), ())) % 100 == 0", [(1,) * 100] * 3, [(1,) * 100] * 1200),
        ("assert len(set(f(1) + [-1])) == 101", list(range(100)), COLLIDING),
        ("assert len(frozenset(f(1) + [-1])) == 101", list(range(100)), COLLIDING),
        (
            "assert len(dict(f(1), a=1)) == 101",
            [(number, 1) for number in range(100)],
            [(number, 1) for number in COLLIDING],
        ),
    ],
)
def test_what_would_take_squares_of_its_size_is_not_computed(
    test: str, fair: object, costly: object
) -> None:
    found = question(test)
    assert found.asks == (Ask("f(1)"),)
    assert found.holds([Answer(True, fair)]) and not found.holds([Answer(True, costly)])


def test_a_call_accepts_a_tuple_for_a_list() -> None:
    found = call_question("f(1)", [[1, 2], 7])
    assert found.asks == (Ask("f(1)"),)
    assert found.holds([Answer(True, (1, 2))]) and found.holds([Answer(True, 7)])
    assert not found.holds([Answer(True, {1, 2})]) and not found.holds([None])


class Lying(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -(1 << 200), 1.5, float("inf"), "ä\ud800", b"\0", 2j, [1, (2, {3: {4}})]],
)
def test_plain_values_come_back(value: object) -> None:
    made = decode(json.loads(json.dumps(encode(value))))
    assert made == value and type(made) is type(value)


def test_objects_become_plain_or_are_refused() -> None:
    made = decode(encode(Lying(3)))
    assert type(made) is int and made != 4
    assert encode(Fraction(4, 2)) == 2 and encode(Fraction(1, 2)) == 0.5
    for value in (object(), len, [object()], type, Fraction(1, 3), Decimal("0.1")):
        with pytest.raises(NotPlain):
            encode(value)
    deep: list[Any] = []
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(NotPlain):
        encode(deep)


@pytest.mark.parametrize(
    "found",
    [
        [],
        ["object", 1],
        [["list"]],
        {"list": 1},
        ["int", "xyz"],
        ["int", "f" * 1_000_000],
        ["int"],
        ["bytes", "zz"],
        ["complex", "1", "2"],
        ["dict", 1],
        ["set", ["list"]],
        ["set", *(["int", hex(n * ((1 << 61) - 1))] for n in range(100))],
    ],
    ids=range(12),
)
def test_what_no_program_would_write_is_refused(found: object) -> None:
    with pytest.raises(BadValue):
        decode(found)
