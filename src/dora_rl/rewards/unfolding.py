"""Test programs made straight: `check` functions put in where they are called, loops written out.

Only changes the syntax tree; computes nothing and executes nothing. What it cannot make straight
without changing what it means, it refuses. Invariant: the statements that come out do, one after
the other in one scope, what the test would do.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Sequence
from typing import cast

STATEMENTS_MAX = 2000


class Inside(Exception):
    """This test cannot be judged outside."""


def unfolded(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    made = _flat(_inlined(body))
    if len(made) > STATEMENTS_MAX:
        raise Inside
    return made


def _inlined(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """`def check(f): ...` and `check(g)`, as the body of `check` with `g` for `f`."""
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    made: list[ast.stmt] = []
    for statement in body:
        match statement:
            case ast.FunctionDef():
                continue
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=given, keywords=[])) if (
                name in functions
            ):
                made += _body_of(functions[name], given, len(made))
            case _:
                made.append(statement)
    if any(isinstance(node, ast.Name) and node.id in functions for node in nodes_of(made)):
        raise Inside
    return made


def _body_of(function: ast.FunctionDef, given: list[ast.expr], number: int) -> list[ast.stmt]:
    """The statements of one call. What they assign gets names of its own."""
    arguments = function.args
    names = [argument.arg for argument in arguments.args]
    odd = (arguments.posonlyargs, arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    if any((*odd, arguments.defaults, function.decorator_list)) or len(names) != len(given):
        raise Inside
    inner = (ast.Return, ast.Global, ast.Nonlocal, ast.Lambda, ast.FunctionDef, ast.NamedExpr)
    nodes = list(nodes_of(function.body))
    if any(isinstance(node, (*inner, ast.ClassDef)) for node in nodes):
        raise Inside
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and _stores(node)}
    if stored & set(names):
        raise Inside
    replaced: dict[str, ast.expr] = {
        name: ast.Name(f"_{function.name}_{number}_{name}", ast.Load()) for name in stored
    }
    first: list[ast.stmt] = []
    for name, value in zip(names, given, strict=True):
        if isinstance(value, ast.Name):
            replaced[name] = value
            continue
        # Computed once, as the argument of a call is.
        own = f"_{function.name}_{number}_{name}"
        first.append(ast.Assign([ast.Name(own, ast.Store())], value))
        replaced[name] = ast.Name(own, ast.Load())
    return [*first, *_replaced(function.body, replaced)]


def _stores(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def nodes_of(statements: Iterable[ast.stmt]) -> Iterable[ast.AST]:
    return (node for statement in statements for node in ast.walk(statement))


class _Replace(ast.NodeTransformer):
    def __init__(self, replaced: dict[str, ast.expr]) -> None:
        self._replaced = replaced

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._replaced.get(node.id)
        if value is None:
            return node
        if not _stores(node):
            return copy.deepcopy(value)
        if not isinstance(value, ast.Name):
            raise Inside  # the variable of a loop is assigned in it
        return ast.Name(value.id, node.ctx)


def _replaced(body: Sequence[ast.stmt], replaced: dict[str, ast.expr]) -> list[ast.stmt]:
    transformer = _Replace(replaced)
    return [cast(ast.stmt, transformer.visit(copy.deepcopy(statement))) for statement in body]


def _flat(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Loops over literals, written out."""
    made: list[ast.stmt] = []
    lists: dict[str, ast.expr] = {}
    for statement in body:
        match statement:
            case ast.For(target=target, iter=source, body=inner, orelse=[]):
                if isinstance(source, ast.Name):
                    source = lists.get(source.id, source)
                for value in _values(source):
                    made += _flat(_replaced(inner, _bound(target, value)))
                    if len(made) > STATEMENTS_MAX:
                        raise Inside
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                lists.pop(name, None)
                if isinstance(value, ast.List | ast.Tuple):
                    lists[name] = value
                made.append(statement)
            case _:
                # `cases.append(...)` changes what a loop over `cases` would see.
                for node in ast.walk(statement) if isinstance(statement, ast.Expr) else ():
                    lists.pop(getattr(node, "id", ""), None)
                made.append(statement)
    return made


def _values(source: ast.expr) -> list[ast.expr]:
    match source:
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            if any(isinstance(entry, ast.Starred) for entry in entries):
                raise Inside
            return entries
        case ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]):
            numbers = range(*(int(ast.literal_eval(bound)) for bound in bounds))
            if len(numbers) > STATEMENTS_MAX:
                raise Inside
            return [ast.Constant(number) for number in numbers]
        case _:
            raise Inside


def _bound(target: ast.expr, value: ast.expr) -> dict[str, ast.expr]:
    match target, value:
        case ast.Name(id=name), _:
            return {name: value}
        case (
            ast.Tuple(elts=targets) | ast.List(elts=targets),
            ast.Tuple(elts=entries) | ast.List(elts=entries),
        ) if len(targets) == len(entries):
            found: dict[str, ast.expr] = {}
            for one, entry in zip(targets, entries, strict=True):
                found |= _bound(one, entry)
            return found
        case _:
            raise Inside
