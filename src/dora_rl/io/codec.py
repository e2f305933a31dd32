"""One codec for everything that is written down or sent: values to plain JSON ones and back.

Types drive it, so there is no pickle and no code in the data. `msgspec` does the work; four rules
are ours, because logs have them and it has not. A member of a union of dataclasses carries its
class name under "is". A dictionary with other keys than strings is a list of pairs. A deque is a
list. Fields that are not given to a constructor are not written. Arrays travel beside a header of
such values in one piece of bytes (`pack_arrays`).

Never decides what a field means. Invariant: what `encode` wrote, `decode` gives back, also from
text; a field that an older release did not write gets its default. A class that had another name
in older releases says so (`FORMER_NAMES`), and so does one whose fields had (`FORMER_FIELDS`, old
name to new); both names are read, the new one is written.
"""

# Reflection over arbitrary types: strict inference has nothing to hold on to here.
# pyright: basic

from __future__ import annotations

import dataclasses
import json
import struct
import types
import typing
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def loads(data: bytes | bytearray | memoryview) -> Any:
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


def tags_of(kind: Any) -> tuple[str, ...]:
    """The names that a class has under "is": the one that is written, and those of older logs."""
    return (kind.__name__, *getattr(kind, "FORMER_NAMES", ()))


def _tagged(classes: list[Any]) -> Rule:
    rules = {tag: rule(kind) for kind in classes for tag in tags_of(kind)}

    def tagged(value: Any) -> dict[str, Any]:
        name = type(value).__name__
        return {"is": name, **rules[name].encode(value)}

    return Rule(_unless_none(tagged), _unless_none(lambda data: rules[data["is"]].decode(data)))


def _fields(kind: Any) -> Rule | None:
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    former = getattr(kind, "FORMER_FIELDS", {})
    if not former and all(field.init and _own(hints[field.name]) is None for field in fields):
        return None
    parts = {field.name: rule(hints[field.name]) for field in fields if field.init}

    def decoded(data: dict[str, Any]) -> Any:
        known = {former.get(name, name): value for name, value in data.items()}
        return kind(**{n: part.decode(known[n]) for n, part in parts.items() if n in known})

    return Rule(
        lambda value: {name: part.encode(getattr(value, name)) for name, part in parts.items()},
        decoded,
    )


# -- arrays ----------------------------------------------------------------------------------------
#
#     u32 header length | header JSON {..., "arrays": [[name, dtype, length], ...]} | bytes

_LENGTH = struct.Struct("<I")
_ITEM_BYTES = {"<i2": 2, "<i4": 4, "<i8": 8, "<f4": 4, "<f8": 8, "|u1": 1}


def pack_arrays(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """One-dimensional arrays; the header is what JSON can say."""
    shapes = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    text = dumps({**header, "arrays": shapes})
    contents = (array.tobytes() for array in arrays.values())
    return b"".join([_LENGTH.pack(len(text)), text, *contents])


def unpack_arrays(data: bytes | bytearray) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    from numpy import frombuffer  # not above: whoever only reads a log does without numpy

    (length,) = _LENGTH.unpack_from(data)
    header, at = loads(data[4 : 4 + length]), 4 + length
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype, count in header["arrays"]:
        if dtype not in _ITEM_BYTES:
            raise ValueError(f"an array of type {dtype!r} does not travel")
        end = at + _ITEM_BYTES[dtype] * count
        arrays[name], at = frombuffer(data[at:end], dtype=dtype), end
    return header, arrays
