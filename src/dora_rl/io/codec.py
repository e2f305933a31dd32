"""One codec for everything that is written down or sent: values to plain JSON ones and back.

Types drive it, so there is no pickle and no code in the data. `msgspec` does the work; four rules
are ours, because logs have them and it has not. A member of a union of dataclasses carries its
class name under "is". A dictionary with other keys than strings is a list of pairs. A deque is a
list. Fields that are not given to a constructor are not written.

Never decides what a field means. Invariant: what `encode` wrote, `decode` gives back, also from
text; a field that an older release did not write gets its default.
"""

# Reflection over arbitrary types: strict inference has nothing to hold on to here.
# pyright: basic

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import msgspec

Change = Callable[[Any], Any]


class Rule(NamedTuple):
    """How values of one type become plain ones and come back."""

    encode: Change
    decode: Change


def encode(kind: Any, value: Any) -> Any:
    """Plain value (for JSON) of `value`, read as type `kind`."""
    return rule(kind).encode(value)


def decode(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `encode` wrote. Raises ValueError or KeyError if it is none."""
    return rule(kind).decode(data)


def dumps(plain: Any) -> bytes:
    """As one line of JSON in ASCII. Numbers that JSON has not (nan, inf) are kept, as in Python."""
    data = msgspec.json.encode(plain)
    if b"null" in data or not data.isascii():  # msgspec writes null for nan
        data = json.dumps(plain, separators=(",", ":")).encode()
    return data


def loads(data: bytes | memoryview) -> Any:
    """The plain value of what `dumps` or `json.dumps` wrote. Raises ValueError."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return json.loads(bytes(data))


def rule(kind: Any) -> Rule:
    own = _own(kind)
    if own is not None:
        return own
    return Rule(msgspec.to_builtins, lambda data: msgspec.convert(data, kind))


@cache
def _own(kind: Any) -> Rule | None:
    """Our rule for a type; None if msgspec needs none, nor for anything within."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        classes = [arg for arg in args if dataclasses.is_dataclass(arg)]
        if len(classes) > 1:
            return _tagged(classes)
        inner = _own(classes[0]) if classes else None
        return inner and Rule(*(_unless_none(change) for change in inner))
    if origin is dict and args[0] is not str:
        key, item = rule(args[0]), rule(args[1])
        return Rule(
            lambda value: [[key.encode(k), item.encode(v)] for k, v in value.items()],
            lambda data: {key.decode(k): item.decode(v) for k, v in data},
        )
    if origin is dict:
        inner = _own(args[1])
        return inner and Rule(*(_of_values(change) for change in inner))
    if origin is deque or (origin is list and _own(args[0])):
        inner = rule(args[0])
        return Rule(
            lambda value: [inner.encode(v) for v in value],
            lambda data: origin(inner.decode(v) for v in data),
        )
    return _fields(kind) if dataclasses.is_dataclass(kind) else None


def _unless_none(change: Change) -> Change:
    return lambda value: None if value is None else change(value)


def _of_values(change: Change) -> Change:
    return lambda value: {key: change(item) for key, item in value.items()}


def _tagged(classes: list[Any]) -> Rule:
    rules = {kind.__name__: rule(kind) for kind in classes}

    def tagged(value: Any) -> dict[str, Any]:
        name = type(value).__name__
        return {"is": name, **rules[name].encode(value)}

    return Rule(_unless_none(tagged), _unless_none(lambda data: rules[data["is"]].decode(data)))


def _fields(kind: Any) -> Rule | None:
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    if all(field.init and _own(hints[field.name]) is None for field in fields):
        return None
    parts = {field.name: rule(hints[field.name]) for field in fields if field.init}
    return Rule(
        lambda value: {name: part.encode(getattr(value, name)) for name, part in parts.items()},
        lambda data: kind(**{n: part.decode(data[n]) for n, part in parts.items() if n in data}),
    )
