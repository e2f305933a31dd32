"""Statement tests, taken apart: what goes into the sandbox, and what stays outside and judges.

Of `assert f(2) == 4` only `f(2)` goes in; its value comes back as plain data, and is compared with
the 4 here, which the program never sees. So for comparisons, `in`, `is`, `not`, `and`, `or`,
arithmetic, `abs`, `round`, `isinstance`, `math.isclose` and the like, for `check` functions made of
them, and for loops over literals. Everything else goes in as it is, and the program can say of it
what it likes. Nothing of a program or a test is executed here; only constants and the operations
listed here are computed, within bounds. Invariant: of what is judged outside, an expected value
never goes in.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dora_rl.rewards.sandbox import values
from dora_rl.rewards.sandbox.limits import Answer, Ask
from dora_rl.rewards.unfolding import Inside, nodes_of, unfolded

Answers = Sequence[Answer | None]
Verdict = Callable[[Answers], Any]  # a value, from the answers to a question's asks

BITS_MAX = 1 << 20  # of a number that is computed here
DIVISOR_BITS_MAX = 1 << 16
ITEMS_MAX = 100_000  # of a sequence that is computed here
COPIES_MAX = 1 << 26  # of entries, where sequences are added up one by one
DIGITS_MAX = 400
FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, AttributeError)


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _bounded(cost: int, most: int) -> None:
    if cost > most:
        raise OverflowError("too large to be computed here")


def _times(a: Any, b: Any) -> Any:
    for one, other in ((a, b), (b, a)):
        if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
            _bounded(len(cast(Sequence[object], one)) * other, ITEMS_MAX)
    _bounded(_bits(a) + _bits(b), BITS_MAX)
    return a * b


def _power(a: Any, b: Any) -> Any:
    _bounded(_bits(a) * abs(b) if isinstance(b, int) else 0, BITS_MAX)
    return a**b


def _divided(how: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def divide(a: Any, b: Any) -> Any:
        if isinstance(a, str | bytes):  # would be formatted
            raise TypeError("no number")
        _bounded(min(_bits(a), _bits(b)), DIVISOR_BITS_MAX)
        return how(a, b)

    return divide


def _shifted(a: Any, b: Any) -> Any:
    _bounded(_bits(a) + b, BITS_MAX)
    return a << b


def _range(*bounds: int) -> range:
    made = range(*bounds)
    _bounded(len(made), ITEMS_MAX)
    return made


def _round(value: Any, digits: int | None = None) -> Any:
    _bounded(abs(digits or 0), DIGITS_MAX)
    return round(value, digits)


def _sum(entries: Any, start: Any = 0) -> Any:
    if isinstance(start, list | tuple):
        entries = list(entries)
        _bounded(len(entries) * sum(map(len, entries)), COPIES_MAX)
    return sum(entries, start)


def _hashed(kind: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    return lambda entries=(): kind(values.spread(list(entries)))


def _dict(entries: Any = (), **named: Any) -> dict[Any, Any]:
    if not isinstance(entries, dict):
        entries = list(entries)
        values.spread([key for key, _ in entries])
    return dict(entries, **named)


COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _times,
    ast.Div: operator.truediv,
    ast.FloorDiv: _divided(operator.floordiv),
    ast.Mod: _divided(operator.mod),
    ast.Pow: _power,
    ast.LShift: _shifted,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}
TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: kind for name, kind in TYPES.items() if kind is not bytes},
    **{one.__name__: one for one in (abs, len, min, max, sorted, chr, ord, isinstance)},
    "type": type,
    "sum": _sum,
    "set": _hashed(set),
    "frozenset": _hashed(frozenset),
    "dict": _dict,
    "round": _round,
    "range": _range,
}
MATH = ("isclose", "sqrt", "log", "exp", "sin", "cos", "fabs", "pi", "e", "tau", "inf", "nan")
STRING_METHODS = ("split", "join", "upper", "lower", "strip", "encode")
# A condition of these is the program's word for it, not a value to compare.
PREDICATES = ("isinstance", "issubclass", "all", "any", "callable", "hasattr")


class Missing(Exception):
    """An answer that the verdict needs did not come, or something was raised instead."""


@dataclass(frozen=True, slots=True)
class Question:
    """One test: what to ask, and whether the answers to it are right. `outside`: no part of the
    verdict is the program's own word."""

    asks: tuple[Ask, ...]
    verdict: Verdict
    outside: bool

    def holds(self, answers: Answers) -> bool:
        try:
            return bool(self.verdict(answers))
        except (Missing, *FAULTS):
            return False


def question(test: str) -> Question:
    """What to ask for a test that is written as Python."""
    try:
        statements = unfolded(ast.parse(test).body)
        found = _judged(statements, frozenset())
        if found is None or not found.asks:
            # `assert max(1, 2) == 2`: what is tested is the program's own `max`.
            called = (node.func for node in nodes_of(statements) if isinstance(node, ast.Call))
            names = frozenset(func.id for func in called if isinstance(func, ast.Name))
            found = _judged(statements, names) or found
        if found is not None:
            return found if found.asks else _alive(found)
    except (Inside, SyntaxError, *FAULTS):
        pass
    return Question((Ask(test, value=False),), _done(0), False)


def _alive(constant: Question) -> Question:
    """A test that asks nothing still wants a program that has come to its tests."""
    ran = _done(0)
    verdict = constant.verdict
    return Question((Ask("pass", value=False),), lambda given: ran(given) and verdict(()), True)


def call_question(code: str, accepted: Sequence[object]) -> Question:
    """The value of an expression is one of those; a tuple counts as a list, as in JSON."""

    def verdict(answers: Answers) -> bool:
        value = _given(answers, 0)
        made = list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value
        return any(made == wanted for wanted in accepted)

    return Question((Ask(code),), verdict, True)


def _given(answers: Answers, index: int) -> Any:
    answer = answers[index]
    if answer is None or not answer.done:
        raise Missing
    return answer.value


def _done(index: int) -> Verdict:
    """Statements ran through."""
    return lambda answers: _given(answers, index) is None


def _judged(statements: Sequence[ast.stmt], shadowed: frozenset[str]) -> Question | None:
    """None if it cannot be judged outside. `shadowed`: built-in names that the program defines."""
    sent = frozenset[str]()
    while True:
        sheet = _Sheet(shadowed, sent)
        try:
            for statement in statements:
                sheet.take(statement)
            return sheet.question()
        except _Sent as name:
            sent |= {str(name)}
        except (Inside, *FAULTS):
            return None


class _Sent(Exception):
    """A name that was kept outside is needed inside as well."""


@dataclass(frozen=True, slots=True)
class _Term:
    """A part of a condition. With a value: known. With a verdict: computed here from the answers
    to what is in it. With neither: the program gives its value as a whole."""

    node: ast.expr
    verdict: Verdict | None = None
    value: tuple[Any, ...] = ()

    @property
    def known(self) -> bool:
        return bool(self.value)

    @property
    def asked(self) -> bool:
        return self.verdict is None and not self.value


class _Sheet:
    """The asks of one test in their order, and the conditions on the answers."""

    def __init__(self, shadowed: frozenset[str], sent: frozenset[str]) -> None:
        self._shadowed, self._sent = shadowed, sent
        self._asks: list[Ask] = []
        self._conditions: list[Verdict] = []
        self._kept: dict[str, _Term] = {}
        self._terms: dict[int, _Term] = {}
        self._imported: set[str] = set()
        self._assigned: set[str] = set()
        self._outside, self._ends_judged = True, True

    def question(self) -> Question:
        conditions = tuple(self._conditions)
        # That the last statement ran is all that such a test says.
        self._outside = self._outside and self._ends_judged
        verdict = lambda answers: all(bool(one(answers)) for one in conditions)  # noqa: E731
        return Question(tuple(self._asks), verdict, self._outside)

    def take(self, statement: ast.stmt) -> None:
        self._ends_judged = isinstance(statement, ast.Assert)
        match statement:
            case ast.Assert(test=test):
                self._conditions.append(self._settled(self._term(test), judged=True))
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                self._imported |= {(name.asname or name.name).split(".")[0] for name in names}
                self._run(statement)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(statement, name, value)
            case ast.Expr(value=ast.Call()):
                self._run(statement)
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case _:
                raise Inside

    def _assign(self, statement: ast.stmt, name: str, value: ast.expr) -> None:
        """A constant stays outside if nothing inside needs it: it may be what is expected."""
        term = self._term(value)
        if not term.asked:
            self._assigned.add(name)
        if name not in self._sent and not term.asked:
            self._kept[name] = term
        elif term.verdict is not None:
            raise Inside
        else:
            self._run(statement)

    def _run(self, statement: ast.stmt) -> None:
        self._check_names(statement)
        self._conditions.append(_done(len(self._asks)))
        self._asks.append(Ask(ast.unparse(ast.fix_missing_locations(statement)), value=False))

    def _check_names(self, node: ast.AST) -> None:
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and one.id in self._kept:
                raise _Sent(one.id)

    def _settled(self, term: _Term, judged: bool = False) -> Verdict:
        """The value of a term, asked for if need be. `judged`: it decides by its truth alone."""
        if term.value:
            return lambda answers: term.value[0]
        if term.verdict is not None:
            return term.verdict
        self._check_names(term.node)
        self._outside = self._outside and not self._is_own_word(term.node, judged)
        index = len(self._asks)
        self._asks.append(Ask(ast.unparse(ast.fix_missing_locations(term.node))))
        return lambda answers: _given(answers, index)

    def _is_own_word(self, node: ast.expr, judged: bool) -> bool:
        """A comparison that the program makes, or a value that is not the program's to give."""
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        # `np.allclose(...)`, or a function that the test imports.
        another = names & self._imported or _is_of_module(node)
        if names & set(PREDICATES) or (judged and another):
            return True
        if not names - self._assigned - (set(dir(builtins)) - self._shadowed):
            return True  # of the test itself, and perhaps what is expected
        return any(isinstance(one, ast.Compare) for one in ast.walk(node))

    def _term(self, node: ast.expr) -> _Term:
        """Once for each part, because a term may ask, and asking twice is calling twice."""
        if id(node) not in self._terms:
            self._terms[id(node)] = self._fresh(node)
        return self._terms[id(node)]

    def _fresh(self, node: ast.expr) -> _Term:
        match node:
            case ast.Constant(value=value):
                return _Term(node, value=(value,))
            case ast.Name(id=name):
                return self._name(node, name)
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in MATH:
                return _Term(node, value=(getattr(math, name),))
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(node, op, operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return self._combined(node, OPERATIONS[type(op)], [left, right])
            case ast.BoolOp(op=op, values=values):
                return self._either(node, isinstance(op, ast.And), values)
            case ast.Compare():
                return self._compared(node)
            case ast.Call():
                return self._called(node)
            case ast.List(elts=entries):
                return self._combined(node, lambda *made: list(made), entries)
            case ast.Tuple(elts=entries):
                return self._combined(node, lambda *made: made, entries)
            case ast.Set(elts=entries):
                return self._combined(node, lambda *made: set(made), entries)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return self._combined(node, _paired, [*cast(list[ast.expr], keys), *values])
            case ast.Subscript(value=inner, slice=index) if not isinstance(index, ast.Slice):
                if self._term(inner).known and self._term(index).known:
                    return self._combined(node, operator.getitem, [inner, index])
                return self._part_of(node, inner)
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                return self._part_of(node, inner)
            case _:
                return _Term(node)

    def _part_of(self, node: ast.expr, inner: ast.expr) -> _Term:
        """The program's, unless it is part of something that is computed here."""
        if self._term(inner).verdict is not None:
            raise Inside
        return _Term(node)

    def _name(self, node: ast.Name, name: str) -> _Term:
        if name in self._kept:
            return self._kept[name]
        known = TYPES.get(name, FUNCTIONS.get(name))
        return (
            _Term(node) if known is None or name in self._shadowed else _Term(node, None, (known,))
        )

    def _unary(self, node: ast.expr, op: ast.unaryop, operand: ast.expr) -> _Term:
        if not isinstance(op, ast.Not):
            return self._combined(node, SIGNS[type(op)], [operand])
        term = self._term(operand)
        inner = self._settled(term, judged=True)
        value = (not term.value[0],) if term.value else ()
        return _Term(node, lambda answers: not inner(answers), value)

    def _either(self, node: ast.expr, every: bool, values: Sequence[ast.expr]) -> _Term:
        parts = [self._settled(self._term(value), judged=True) for value in values]

        def verdict(answers: Answers) -> Any:
            found: Any = None
            for part in parts:
                found = part(answers)
                if bool(found) is not every:
                    return found
            return found

        return _Term(node, verdict)

    def _compared(self, node: ast.Compare) -> _Term:
        how = [COMPARISONS[type(op)] for op in node.ops]

        def chain(*operands: Any) -> bool:
            pairs = zip(how, operands, operands[1:], strict=False)
            return all(bool(one(a, b)) for one, a, b in pairs)

        return self._combined(node, chain, [node.left, *node.comparators])

    def _called(self, node: ast.Call) -> _Term:
        arguments, named = list(node.args), [keyword.arg or "" for keyword in node.keywords]
        match node.func:
            case ast.Name(id=name) if name in FUNCTIONS and name not in self._shadowed:
                function = FUNCTIONS[name]
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in MATH:
                function = getattr(math, name)
            case ast.Attribute(value=text, attr=name) if name in STRING_METHODS and all(
                self._term(one).known for one in (text, *arguments)
            ):
                arguments = [text, *arguments]
                function = getattr(str, name)
            case ast.Attribute(value=inner):
                return self._part_of(node, inner)
            case _:
                return _Term(node)
        if any(isinstance(one, ast.Starred) for one in arguments) or "" in named:
            return _Term(node)
        options = [*arguments[1:], *(keyword.value for keyword in node.keywords)]
        if arguments and self._term(arguments[0]).asked and self._are_options(function, options):
            return _Term(node)
        if function is type and len(arguments) == 1:
            inside = self._settled(self._term(arguments[0]))
            return _Term(node, lambda answers: type(inside(answers)))
        num_plain = len(arguments)
        arguments += [keyword.value for keyword in node.keywords]

        def call(*given: Any) -> Any:
            return function(*given[:num_plain], **dict(zip(named, given[num_plain:], strict=True)))

        return self._combined(node, call, arguments)

    def _are_options(self, function: Callable[..., Any], options: Sequence[ast.expr]) -> bool:
        """No value that is expected, as `reverse=True`: the call goes in as a whole, since what it
        is given may be no plain data, as a generator that is sorted."""
        if function in (type, isinstance) or not options:
            return False
        known = [self._term(one).value for one in options]
        plain = (bool, type(None), *((int,) if function is _round else ()))
        return all(value and (callable(value[0]) or isinstance(value[0], plain)) for value in known)

    def _combined(
        self, node: ast.expr, how: Callable[..., Any], parts: Sequence[ast.expr]
    ) -> _Term:
        """Known if all parts are, the program's if all are the program's, otherwise of both."""
        terms = [self._term(part) for part in parts]
        if all(term.known for term in terms):
            return _Term(node, value=(how(*(term.value[0] for term in terms)),))
        if all(term.asked for term in terms):
            return _Term(node)
        verdicts = [self._settled(term) for term in terms]
        return _Term(node, lambda answers: how(*(verdict(answers) for verdict in verdicts)))


def _is_of_module(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name() | ast.Attribute())):
            return True
        case _:
            return False


def _paired(*keys_and_values: Any) -> dict[Any, Any]:
    half = len(keys_and_values) // 2
    return dict(zip(keys_and_values[:half], keys_and_values[half:], strict=True))
