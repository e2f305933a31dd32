"""Functions that are given as objects, written down as one module that any process can import.

    carry = Carry()
    name = carry.add(lambda completion, answer: float(answer in completion))   # "lambda_1"
    carry.text()    # the module in which `lambda_1` is that function

What is in an importable module is imported there. A function of a script, of a notebook cell or of
another function, and a lambda, is written down as its source, with whatever it uses: functions and
classes in the same way, modules as imports, plain values as they are now. So nothing is pickled,
the run can be resumed without the program that began it, and the file can be read.

Invariant: what cannot travel is a `UserError` of one line that names it, before anything is
written. Never runs the user's code.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import dis
import inspect
import linecache
import logging
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path, PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from dora_rl.types import UserError
from dora_rl.user_code import require

FILE_HINT = "put it into a file and give path/to/file.py:name"
_HEAD = '''"""What was given to dora_rl.train as objects, for every process of the run."""

from __future__ import annotations
'''


class Carry:
    """The module, as it grows with each function that is added."""

    def __init__(self) -> None:
        self._stands_for: dict[str, Any] = {}
        self._imports: list[str] = []
        self._parts: list[str] = []
        self._folders: dict[str, None] = {}

    def add(self, function: Callable[..., Any]) -> str:
        """The name that the function has in the module."""
        wanted = getattr(function, "__name__", "")
        require(
            (
                inspect.isfunction(inspect.unwrap(function)) or inspect.isclass(function),
                f"{_shown(function)} is neither a function nor a class; for arguments of your own "
                f"give functools.partial of a function, or {FILE_HINT}",
            )
        )
        names = (f"{wanted}{'_' * number}" for number in count())
        if not wanted.isidentifier():
            names = (f"lambda_{number}" for number in count(1))
        known = self._stands_for
        name = next(n for n in names if n not in known or _is_same(known[n], function))
        self._need(name, function, user=name)
        return name

    def text(self) -> str:
        """The whole module; nothing where nothing was added."""
        if not self._stands_for:
            return ""
        lines = ["import sys", ""] * bool(self._folders)
        for folder in self._folders:
            lines += [f"if {folder!r} not in sys.path:", f"    sys.path.append({folder!r})"]
        body = [_HEAD, *lines, *self._imports, *(f"\n\n{part}" for part in self._parts)]
        return "\n".join(body).rstrip() + "\n"

    def _need(self, name: str, value: Any, user: str) -> None:
        """From here on `name` is `value` in the module. `user` is the function that uses it."""
        if name in self._stands_for:
            require(
                (
                    _is_same(self._stands_for[name], value),
                    f"{user} uses {name!r}, and so does another function that is given, for "
                    f"something else; rename one of them, or {FILE_HINT}",
                )
            )
            return
        self._stands_for[name] = value
        if (line := self._import_of(name, value)) is not None:
            self._imports.append(line)
        elif inspect.isfunction(inspect.unwrap(value)) or inspect.isclass(value):
            self._write(name, value)
        else:
            self._parts.append(f"{name} = {_literal(name, value, user)}")

    def _import_of(self, name: str, value: Any) -> str | None:
        """The line that imports a value under a name; None: it has no importable home."""
        module = value if isinstance(value, ModuleType) else _home(value)
        if value is dataclasses.KW_ONLY:
            return f"from dataclasses import KW_ONLY as {name}"
        if module is None:
            return None
        if (folder := _folder_of(module)) is not None:
            self._folders[folder] = None
        if module is value:
            whole = module.__name__
            return f"import {whole}" if whole == name else f"import {whole} as {name}"
        own = value.__qualname__
        return f"from {module.__name__} import {own}" + (f" as {name}" if own != name else "")

    def _write(self, name: str, value: Any) -> None:
        """The source of a function or class, behind the sources of all that it uses."""
        inner = inspect.unwrap(value)
        source, own = source_of(inner), inner.__name__
        around = _around(inner)
        is_decorated = source.lstrip().startswith("@")
        if inspect.isfunction(inner):
            # Written down with its decorators, it is what its own name stands for, and no less.
            require(
                (
                    not is_decorated or around.get(own) is value,
                    f"{own} is decorated, and the function inside of the decorator is used alone; "
                    f"{FILE_HINT}",
                ),
                (
                    is_decorated or inner is value,
                    f"{_shown(inner)} is wrapped without a decorator, which cannot be read from "
                    f"its source; write @ above it, or {FILE_HINT}",
                ),
            )
        if own.isidentifier():
            self._stands_for.setdefault(own, value)
        if inspect.isfunction(inner):
            source = self._with_defaults(source, inner, name, around)
        fields = [n for n in _names_of_fields(source) if _is_a_kind(around.get(n))]
        for used in dict.fromkeys([*_names_used(source), *fields]):
            if used in around:
                self._need(used, around[used], user=_shown(inner))
        if not own.isidentifier():
            source = f"{name} = {source}"
        elif own != name:
            source = f"{source}\n\n\n{name} = {own}"
        set_later = {} if is_decorated else _set_later(inner, source)
        for attribute, found in set_later.items():
            text = _literal(f"{own}.{attribute}", found, _shown(inner))
            source += f"\n\n\n{name}.{attribute} = {text}"
        self._parts.append(source)

    def _with_defaults(
        self, source: str, function: FunctionType, name: str, around: Mapping[str, Any]
    ) -> str:
        """Defaults are what they were when the function was defined, whatever the names in them
        stand for now."""
        tree = ast.parse(source)
        of = _arguments_of(tree, function)
        if of is None:
            return source
        places = [*of.posonlyargs, *of.args][-len(of.defaults) :] if of.defaults else []
        pairs = [*zip(places, of.defaults, function.__defaults__ or (), strict=False)]
        by_name = function.__kwdefaults__ or {}
        pairs += [
            (place, node, by_name[place.arg])
            for place, node in zip(of.kwonlyargs, of.kw_defaults, strict=True)
            if node is not None and place.arg in by_name
        ]
        lines = source.encode().splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        text = source.encode()
        for place, node, value in reversed(pairs):
            if _still_is(node, value, around):
                continue
            stands = f"_{name}_{place.arg}"
            self._need(stands, value, user=_shown(function))
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
            text = text[:begin] + stands.encode() + text[end:]
        return text.decode()


def source_of(value: Any) -> str:
    """The source of a function or class, moved to the left margin; of a lambda its expression."""
    refusal = (
        f"{_shown(value)} cannot travel to the processes of the run: its source cannot be read "
        f"alone; {FILE_HINT}"
    )
    try:
        if own := _class_of_methods(value, refusal):
            return own
        lines, first = inspect.findsource(value)
        if getattr(value, "__name__", "") == "<lambda>":
            return _lambda_in("".join(lines), value, refusal)
        block = "".join(inspect.getblock(lines[first:]))
    except (OSError, TypeError, SyntaxError) as error:
        raise UserError(refusal) from error
    if inspect.isfunction(value):
        return _alone(block, value, value, refusal)
    one = len(_classes_in("".join(lines), value.__qualname__)) <= 1
    require((one, f"{refusal}: there are several of that name in its file"))
    return textwrap.dedent(block).rstrip()


def _lambda_in(text: str, value: FunctionType, refusal: str) -> str:
    """The smallest lambda around the places of the function's own code."""
    code = value.__code__
    places = [p for p in code.co_positions() if None not in p and (p[2], p[3]) != (0, 0)]
    begin = min(((p[0], p[2]) for p in places), default=(0, 0))
    end = max(((p[1], p[3]) for p in places), default=(0, 0))
    fitting: list[ast.Lambda] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Lambda):
            continue
        body = node.body
        from_, to = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
        if from_ <= begin and end <= to:  # type: ignore[operator]
            fitting.append(node)
    require((fitting, refusal))
    source = "(" + ast.unparse(max(fitting, key=lambda node: (node.lineno, node.col_offset))) + ")"
    found = _codes_in(_compiled(source, "eval", code))
    require((any(_is_same_code(one, code) for one in found), refusal))
    return source


def _compiled(source: str, mode: str, like: CodeType) -> CodeType:
    """With the annotations that a function was compiled with, and not those of this file."""
    flags = like.co_flags & annotations.compiler_flag
    return compile(source, "given", mode, flags=flags, dont_inherit=True)


def _classes_in(text: str, qualname: str) -> list[ast.ClassDef]:
    """Those that a piece of source defines under that name: of an if and its else both."""

    def look(node: ast.AST, around: str) -> Iterator[ast.ClassDef]:
        for one in ast.iter_child_nodes(node):
            own = around
            if isinstance(one, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                own = f"{around}{one.name}"
                if isinstance(one, ast.ClassDef) and own == qualname:
                    yield one
                own += "." if isinstance(one, ast.ClassDef) else ".<locals>."
            yield from look(one, own)

    return list(look(ast.parse(text), ""))


def _class_of_methods(value: Any, refusal: str) -> str:
    """The source of a class by the places of its methods: of several classes of one name, in a file
    or in the cells of a notebook, it is the right one. Empty: it is none, or has no method."""
    if not inspect.isclass(value):
        return ""
    own = [f for f in _methods(value) if f.__code__.co_qualname.startswith(value.__qualname__)]
    for method in own:
        lines = linecache.getlines(method.__code__.co_filename)
        at = method.__code__.co_firstlineno
        around = [
            node
            for node in _classes_in("".join(lines), value.__qualname__)
            if node.lineno <= at <= (node.end_lineno or 0)
        ]
        if not around:
            continue
        node = max(around, key=lambda node: node.lineno)
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        return _alone("".join(lines[first - 1 : node.end_lineno]), method, value, refusal)
    return ""


def _alone(block: str, function: FunctionType, value: Any, refusal: str) -> str:
    """A block of source that defines a function, moved to the left margin, unless that would change
    a text of several lines in it."""
    for written in (textwrap.dedent(block).rstrip(), f"if True:\n{block.rstrip()}"):
        try:
            found = _codes_in(_compiled(written, "exec", function.__code__))
        except SyntaxError:
            continue
        if any(_is_same_code(code, function.__code__) for code in found):
            _refuse_relative(written, value)
            return written
    raise UserError(f"{refusal}, or define it again if its file has changed since")


def _methods(value: type) -> list[FunctionType]:
    """The functions in the body of a class, out of staticmethod, property and their like."""
    bare = (
        getattr(one, "fget", None) or getattr(one, "__func__", one) for one in vars(value).values()
    )
    return [one for one in map(inspect.unwrap, bare) if isinstance(one, FunctionType)]


def _refuse_relative(source: str, value: Any) -> None:
    nodes = ast.walk(ast.parse(source))
    has = any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)
    require((not has, f"{_shown(value)} imports relatively (from .name); write the whole name"))


def _arguments_of(tree: ast.Module, function: FunctionType) -> ast.arguments | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    name = function.__name__
    found = (n for n in nodes if isinstance(n, ast.Lambda) or n.name == name)
    node = next(found, None)
    return None if node is None else node.args


def _still_is(node: ast.expr, value: Any, around: Mapping[str, Any]) -> bool:
    """Whether an expression in the module is what it was where it was written."""
    try:
        return _written(ast.literal_eval(node)) == _written(value)
    except (ValueError, TypeError, SyntaxError, _Unwritable):
        pass
    if isinstance(node, ast.Name) and node.id in around:
        return around[node.id] is value
    names = [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
    inner = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    return bool(names) and all(
        callable(found) or isinstance(found, ModuleType)
        for name in names
        if name not in inner
        for found in (around.get(name, vars(builtins).get(name)),)
    )


def _set_later(value: Any, source: str) -> dict[str, Any]:
    """The attributes that a function or a class was given behind its definition, as far as they are
    plain values; those of the body of a class as they are now."""
    if inspect.isfunction(value):
        return {name: one for name, one in vars(value).items() if name.isidentifier()}
    if type(value) is not type:  # an Enum, and others that make their own attributes
        return {}
    body = next((n.body for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)), [])
    nodes: dict[str, ast.expr] = {}
    for line in body:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and (right := getattr(line, "value", None)):
                nodes[target.id] = right
    found: dict[str, Any] = {}
    for name, one in vars(value).items():
        if (name.startswith("_") and name not in nodes) or name.startswith("__"):
            continue
        try:
            _written(one)
        except _Unwritable:
            continue
        if name not in nodes or not _still_is(nodes[name], one, {}):
            found[name] = one
    return found


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Of the functions that a code object defines."""
    for part in _inner(code):
        yield part
        yield from _codes_in(part)


def _is_same_code(one: CodeType, other: CodeType) -> bool:
    """What was written, as far as it does not tell whether a name is global or of a closure."""
    inner = [*_inner(one)], [*_inner(other)]
    return (
        [*_steps_of(one)] == [*_steps_of(other)]
        and _parts_of(one) == _parts_of(other)
        and len(inner[0]) == len(inner[1])
        and all(map(_is_same_code, *inner))
    )


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (part for part in code.co_consts if isinstance(part, CodeType))


def _parts_of(code: CodeType) -> tuple[Any, ...]:
    plain = [repr(part) for part in code.co_consts if not isinstance(part, CodeType)]
    # The name of an inner function says where it was defined.
    values = [part for part in plain if "<locals>" not in part and "<lambda>" not in part]
    return code.co_name, code.co_varnames, {*code.co_names, *code.co_freevars}, values


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_OPERATORS = ("BINARY_OP", "COMPARE_OP", "IS_OP", "CONTAINS_OP", "LOAD_ATTR", "LOAD_METHOD")


def _steps_of(code: CodeType) -> Iterator[tuple[str, str]]:
    """What it computes on what, in order; where a name is kept is left out."""
    kept = {*code.co_freevars, *code.co_cellvars}
    for one in dis.get_instructions(code):
        name = one.opname
        if name in _LOADS or (name.startswith("LOAD_FAST") and one.argval not in kept):
            yield "load", str(one.argval)
        elif name in _OPERATORS:
            is_named = name.startswith("LOAD")
            yield name.replace("METHOD", "ATTR"), str(one.argval) if is_named else one.argrepr
        elif name.startswith(("UNARY", "POP_JUMP", "JUMP_IF")):
            yield name, ""


def _is_a_kind(value: Any) -> bool:
    """What an annotation may need at run time and the module can have."""
    is_named = inspect.isclass(value) or isinstance(value, ModuleType)
    return is_named or value is dataclasses.KW_ONLY or _home(value) is not None


def _names_used(source: str) -> list[str]:
    """The names that a piece of source reads and does not bind itself, as a module would."""
    found: dict[str, None] = {}

    def look(table: symtable.SymbolTable, is_top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() if is_top else symbol.is_global():
                found[symbol.get_name()] = None
        for inner in table.get_children():
            look(inner, False)

    # Annotations stay texts, and what they name need not travel.
    look(symtable.symtable(f"from __future__ import annotations\n{source}", "given", "exec"), True)
    return list(found)


def _names_of_fields(source: str) -> list[str]:
    """In the annotations of a class, where dataclasses and others look."""
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    fields = (line for one in classes for line in one.body if isinstance(line, ast.AnnAssign))
    nodes = (node for line in fields for node in ast.walk(line.annotation))
    return list(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))


def _around(value: Any) -> dict[str, Any]:
    """Every name that a function or class may use, but for Python's own."""
    if inspect.isclass(value):
        functions = _methods(value)
        module = sys.modules.get(value.__module__)
        names = dict(vars(module)) if module is not None else {}
    else:
        functions, names = [value], value.__globals__
    return {**names, **{k: v for one in functions for k, v in _closure(one).items()}}


def _closure(function: FunctionType) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return {name: value for name, value in found.items() if name != "__class__"}


def _home(value: Any) -> ModuleType | None:
    """The module in which a process finds this very object under its own name."""
    name, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or name == "__main__" or not own.isidentifier():
        return None
    if module is not builtins and getattr(module, "__spec__", None) is None:
        return None  # nobody could import it again
    can_be_found = _file_of(module) is None or _root_of(module) is not None
    return module if getattr(module, own, None) is value and can_be_found else None


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _root_of(module: ModuleType) -> Path | None:
    """The folder from which a module is imported; None: its file does not lie as its name says."""
    file, parts = _file_of(module), module.__name__.split(".")
    if file is None:
        return None
    if file.stem == "__init__":
        parts = [*parts, "__init__"]
    fits = [*file.parts[-len(parts) : -1], file.name.partition(".")[0]] == parts
    return file.parents[len(parts) - 1] if fits else None


def _folder_of(module: ModuleType) -> str | None:
    """What must be on the path of a process that imports it; None: it has that already."""
    root = _root_of(module)
    if root is None:
        return None
    own = {Path(place).resolve() for place in sysconfig.get_paths().values()}
    own.add(Path(sysconfig.get_path("stdlib")).resolve() / "lib-dynload")
    return None if root in own else str(root)


def _literal(name: str, value: Any, user: str) -> str:
    """A plain value as Python writes it."""
    try:
        return _written(value)
    except (_Unwritable, RecursionError):
        pass
    raise UserError(
        f"{user} uses {name!r}, a {type(value).__name__}, which cannot travel to the processes of "
        f"the run; make it inside of the function, or {FILE_HINT}"
    )


class _Unwritable(Exception):
    """A value that is not plain."""


def _written(value: Any) -> str:
    """A value of exactly such a type as Python reads back from what is written here."""
    kind = type(value)
    if kind is float:
        return repr(value) if np.isfinite(value) else f"float({str(value)!r})"
    if value is None or value is ... or kind in (bool, int, str, bytes):
        return repr(value)
    if kind is complex and np.isfinite(value):
        return repr(value)
    if kind in (list, tuple, set, frozenset):
        inner = ", ".join(map(_written, value))
        if kind is list:
            return f"[{inner}]"
        if kind is tuple:
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        return f"{kind.__name__}([{inner}])" if kind is frozenset or not value else f"{{{inner}}}"
    if kind is dict:
        return "{" + ", ".join(f"{_written(k)}: {_written(v)}" for k, v in value.items()) + "}"
    for kinds, module, call in _MADE_BY_CALLS:
        if isinstance(value, kinds):
            return f"__import__({module!r}).{call(value)}"
    raise _Unwritable


# Kinds of values, and what makes them again: a module, and a call in it.
_MADE_BY_CALLS: tuple[tuple[Any, str, Callable[[Any], str]], ...] = (
    (re.Pattern, "re", lambda value: f"compile({value.pattern!r}, {value.flags})"),
    (logging.Logger, "logging", lambda value: f"getLogger({value.name!r})"),
    (PurePath, "pathlib", lambda value: f"{type(value).__name__}({str(value)!r})"),
    (
        (np.bool_, np.integer, np.floating),
        "numpy",
        lambda value: f"{type(value).__name__}({str(value.item())!r})",
    ),
)


def _is_same(one: Any, other: Any) -> bool:
    plain = type(one) is type(other) and isinstance(one, (str, int, float, bool))
    return one is other or (plain and one == other)


def label_of(name: str) -> str:
    """What figures and messages call a function of the module."""
    return "lambda" if name == "lambda_1" else name


def _shown(value: Any) -> str:
    name = getattr(value, "__name__", "") or f"a {type(value).__name__}"
    if inspect.ismethod(value):
        owner = value.__self__ if inspect.isclass(value.__self__) else type(value.__self__)
        return f"{name}, a method of {owner.__name__},"
    return "a lambda" if name == "<lambda>" else name
