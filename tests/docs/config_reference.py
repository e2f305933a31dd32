"""The configuration reference, docs/config.md, written from the types in `dora_rl.config`.

    python tests/docs/config_reference.py docs/config.md

A key's description is the text that stands below it in the source. Never says anything the types
do not say. Invariant: every key of every section is in the page, in the order of the
source; a test fails when the page is older than the types.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dora_rl import config
from dora_rl.config.on_resume import RULES

_HEAD = """# Configuration reference

Written by `make docs` from `src/dora_rl/config`; do not edit. A run is one TOML file with these
sections; any key can be set on the command line as `section.key=value`. Unknown keys are errors
that name the nearest one. The resolved configuration is written to `config.json` in the run
directory and can be given to `train` again. Only `model.path` has no default; data and a
reward (or an environment) are needed to train. With `--resume` a key may change at once, from a
later step on, or not at all; then one line names the key and both values.

"""
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_PLAIN = {int: "integer", float: "number", bool: "true or false", str: "string", Any: "anything"}


def reference() -> str:
    """The whole page."""
    sections = config.RunConfig.model_fields
    parts = [_HEAD]
    for name, field in sections.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        parts.append("\n".join(_section(f"[{name}]", field.annotation, name)))
        for entry, keys in entries_of(field.annotation).items():
            title = "Entries of " + " and ".join(f"{name}.{key}" for key in keys)
            parts.append("\n".join(_section(title, entry, f"{name}.{keys[0]}[]")))
    return "\n".join(parts)


def _section(title: str, kind: type[BaseModel], path: str) -> Iterator[str]:
    text = re.sub(r"^\[\w+\] ", "", inspect.cleandoc(kind.__doc__ or "").replace("\n\n", "\n"))
    yield f"## {title}\n\n{text[:1].upper()}{text[1:]}\n"
    yield "| key | kind | default | may change on resume | what |\n|---|---|---|---|---|"
    said = texts_of(kind)
    for key, field in kind.model_fields.items():
        rule = RULES[f"{path}.{key}"].value
        cells = (f"`{key}`", kind_of(field), _default(field), rule, said.get(key, ""))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def entries_of(kind: type[BaseModel]) -> dict[type[BaseModel], list[str]]:
    """The tables that lists of a section hold, each with the keys of those lists."""
    found: dict[type[BaseModel], list[str]] = {}
    for key, field in kind.model_fields.items():
        for inner in typing.get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                found.setdefault(inner, []).append(key)
    return found


def kind_of(field: FieldInfo) -> str:
    """A field's kind in words, with its bounds: `integer ≥ 1`."""
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in _SIGNS.items()
        if getattr(rule, name, None) is not None
    ]
    return " ".join([_words(field.annotation), *bounds])


def _words(kind: Any) -> str:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(f"`{member.value}`" for member in kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table"
    inner = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _words(inner[0])
    if origin is typing.Literal:
        return " | ".join(f"`{value}`" for value in inner)
    if origin in (types.UnionType, typing.Union):
        named = [_words(part) for part in inner if part is not type(None)]
        return " or ".join(named)
    if origin is tuple:
        many = "list" if inner[-1] is Ellipsis else f"{len(inner)} values"
        return f"{many} of {_words(inner[0])}".replace("of table", "of tables")
    assert origin is dict, f"no words for {kind}"
    return "table"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "–"
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value != "" else '`""`'


def texts_of(kind: type[BaseModel]) -> dict[str, str]:
    """Key -> the text below it in the source, of one class and those it inherits from."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if issubclass(owner, BaseModel) and owner is not BaseModel:
            (definition,) = ast.parse(inspect.getsource(owner)).body
            assert isinstance(definition, ast.ClassDef)
            for key, below in pairwise(definition.body):
                match key, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        found[name] = " ".join(text.split())
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
