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
import inspect
import logging
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

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
        if inspect.isfunction(inner) and _is_decorated(source):
            # Written down with its decorators, it is what its own name stands for, and no less.
            known = around.get(own)
            require(
                (
                    known is not None and inspect.unwrap(known) is inner,
                    f"{own} is decorated, and the function inside of the decorator is used alone; "
                    f"{FILE_HINT}",
                )
            )
        if own.isidentifier():
            self._stands_for.setdefault(own, value)
        for used in _names_used(source):
            if used in around:
                self._need(used, around[used], user=_shown(inner))
        if not own.isidentifier():
            source = f"{name} = {source}"
        elif own != name:
            source = f"{source}\n\n\n{name} = {own}"
        self._parts.append(source)


def source_of(value: Any) -> str:
    """The source of a function or class, moved to the left margin; of a lambda its expression."""
    refusal = (
        f"{_shown(value)} cannot travel to the processes of the run: its source cannot be read "
        f"alone; {FILE_HINT}"
    )
    try:
        lines, first = inspect.findsource(value)
        if getattr(value, "__name__", "") == "<lambda>":
            return _lambda_in("".join(lines), value, refusal)
        block = "".join(inspect.getblock(lines[first:]))
    except (OSError, TypeError, SyntaxError) as error:
        raise UserError(refusal) from error
    source = textwrap.dedent(block).rstrip()
    if not inspect.isfunction(value):
        return source
    # To the left margin, unless that would change a text of several lines in it.
    for written in (source, f"if True:\n{block.rstrip()}"):
        try:
            found = _codes_in(compile(written, "given", "exec"))
        except SyntaxError:
            continue
        if any(_is_same_code(code, value.__code__) for code in found):
            return written
    raise UserError(f"{refusal}, or define it again if its file has changed since")


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
    found = _codes_in(compile(source, "given", "eval"))
    require((any(_is_same_code(one, code) for one in found), refusal))
    return source


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Of the functions that a code object defines."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from _codes_in(part)


def _is_same_code(one: CodeType, other: CodeType) -> bool:
    """What was written, as far as it does not tell whether a name is global or of a closure."""
    parts = (_parts_of(one), _parts_of(other))
    inner = (list(_inner(one)), list(_inner(other)))
    return (
        parts[0] == parts[1]
        and len(inner[0]) == len(inner[1])
        and all(map(_is_same_code, inner[0], inner[1]))
    )


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (part for part in code.co_consts if isinstance(part, CodeType))


def _parts_of(code: CodeType) -> tuple[Any, ...]:
    plain = [repr(part) for part in code.co_consts if not isinstance(part, CodeType)]
    # The name of an inner function says where it was defined.
    values = [part for part in plain if "<locals>" not in part and "<lambda>" not in part]
    return code.co_name, code.co_varnames, {*code.co_names, *code.co_freevars}, values


def _is_decorated(source: str) -> bool:
    return source.lstrip().startswith("@")


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


def _around(value: Any) -> dict[str, Any]:
    """Every name that a function or class may use, but for Python's own."""
    if inspect.isclass(value):
        functions = [one for one in vars(value).values() if isinstance(one, FunctionType)]
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
    found = getattr(module, own, None)
    return module if found is value and _can_be_found(module) else None


def _can_be_found(module: ModuleType) -> bool:
    return _file_of(module) is None or _root_of(module) is not None


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
    if isinstance(value, re.Pattern):
        return f"__import__('re').compile({value.pattern!r}, {value.flags})"
    if isinstance(value, logging.Logger):
        return f"__import__('logging').getLogger({value.name!r})"
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    if isinstance(value, float):  # not a finite one
        return f"float({text!r})"
    raise UserError(
        f"{user} uses {name!r}, a {type(value).__name__}, which cannot travel to the processes of "
        f"the run; make it inside of the function, or {FILE_HINT}"
    )


def _is_same(one: Any, other: Any) -> bool:
    if inspect.unwrap(one) is inspect.unwrap(other):
        return True
    return type(one) is type(other) and isinstance(one, (str, int, float, bool)) and one == other


def label_of(name: str) -> str:
    """What figures and messages call a function of the module."""
    return "lambda" if name == "lambda_1" else name


def _shown(value: Any) -> str:
    name = getattr(value, "__name__", "") or f"a {type(value).__name__}"
    if inspect.ismethod(value):
        owner = value.__self__ if inspect.isclass(value.__self__) else type(value.__self__)
        return f"{name}, a method of {owner.__name__},"
    return "a lambda" if name == "<lambda>" else name
