"""One codec for everything that is written down: dataclasses to plain JSON values and back.

Types drive it, so there is no pickle and no code in the data. A dataclass is a dictionary of its
`init` fields; a member of a union of dataclasses carries its class name under "is". Dictionaries
with other keys than strings become lists of pairs.
"""

# Reflection over arbitrary types: strict inference has nothing to hold on to here.
# pyright: basic

from __future__ import annotations

import dataclasses
import types
import typing
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, cast

Encode = Callable[[Any], Any]
_encoders: dict[Any, Encode] = {}
_decoders: dict[Any, Encode] = {}
_PLAIN = (int, float, str, bool)


def encode(kind: Any, value: Any) -> Any:
    """Plain JSON value of `value`, read as type `kind`."""
    return encoder(kind)(value)


def decode(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `encode` wrote."""
    return decoder(kind)(data)


def encoder(kind: Any) -> Encode:
    if kind not in _encoders:
        _encoders[kind] = _make(kind, encoder, _encode_fields, _encode_union, encoding=True)
    return _encoders[kind]


def decoder(kind: Any) -> Encode:
    if kind not in _decoders:
        _decoders[kind] = _make(kind, decoder, _decode_fields, _decode_union, encoding=False)
    return _decoders[kind]


def _same(value: Any) -> Any:
    return value


def _make(
    kind: Any,
    part: Callable[[Any], Encode],
    fields: Callable[[Any], Encode],
    union: Callable[[tuple[Any, ...]], Encode],
    *,
    encoding: bool,
) -> Encode:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return union(args)
    if origin in (list, deque):
        item = part(args[0])
        make = list if encoding or origin is list else deque
        return lambda values: make(item(v) for v in values)
    if origin is tuple:
        return _tuple(args, part, encoding=encoding)
    if origin is dict:
        return _mapping(args, part, encoding=encoding)
    if kind in _PLAIN or kind in (Any, object):
        return _same
    if kind is None or kind is type(None):
        return _same
    if isinstance(kind, type) and issubclass(kind, Enum):
        return (lambda v: v.value) if encoding else kind
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        parts = [part(hint) for hint in typing.get_type_hints(kind).values()]
        if encoding:
            return lambda value: [p(v) for p, v in zip(parts, value, strict=True)]
        return lambda data: kind(*[p(v) for p, v in zip(parts, data, strict=True)])
    if dataclasses.is_dataclass(kind):
        return fields(kind)
    raise TypeError(f"the codec has no rule for {kind!r}")


def _tuple(args: tuple[Any, ...], part: Callable[[Any], Encode], *, encoding: bool) -> Encode:
    make = cast(Encode, list if encoding else tuple)
    if len(args) == 2 and args[1] is Ellipsis:
        item = part(args[0])
        return lambda values: make(item(v) for v in values)
    parts = [part(arg) for arg in args]
    return lambda values: make(p(v) for p, v in zip(parts, values, strict=True))


def _mapping(args: tuple[Any, ...], part: Callable[[Any], Encode], *, encoding: bool) -> Encode:
    key, item = part(args[0]), part(args[1])
    if args[0] is str:
        return lambda value: {k: item(v) for k, v in value.items()}
    if encoding:
        return lambda value: [[key(k), item(v)] for k, v in value.items()]
    return lambda data: {key(k): item(v) for k, v in data}


def _init_fields(kind: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    return [(f.name, hints[f.name]) for f in dataclasses.fields(kind) if f.init]


def _encode_fields(kind: Any) -> Encode:
    parts = [(name, encoder(hint)) for name, hint in _init_fields(kind)]
    return lambda value: {name: p(getattr(value, name)) for name, p in parts}


def _decode_fields(kind: Any) -> Encode:
    parts = [(name, decoder(hint)) for name, hint in _init_fields(kind)]
    return lambda data: kind(**{name: p(data[name]) for name, p in parts if name in data})


def _encode_union(args: tuple[Any, ...]) -> Encode:
    classes = {arg for arg in args if dataclasses.is_dataclass(arg)}
    others = [arg for arg in args if arg not in classes and arg is not type(None)]
    plain = encoder(others[0]) if len(others) == 1 else _same
    if len(classes) == 1:
        only = encoder(next(iter(classes)))
        return lambda value: None if value is None else only(value)

    def tagged(value: Any) -> Any:
        if value is None:
            return None
        if type(value) in classes:
            return {"is": type(value).__name__, **encoder(type(value))(value)}
        return plain(value)

    return tagged


def _decode_union(args: tuple[Any, ...]) -> Encode:
    classes = {getattr(a, "__name__", ""): a for a in args if dataclasses.is_dataclass(a)}
    others = [arg for arg in args if not dataclasses.is_dataclass(arg) and arg is not type(None)]
    plain = decoder(others[0]) if len(others) == 1 else _same
    if len(classes) == 1:
        only = decoder(next(iter(classes.values())))
        return lambda data: None if data is None else only(data)

    def tagged(data: Any) -> Any:
        if data is None:
            return None
        if classes and isinstance(data, dict):
            return decoder(classes[cast("dict[str, Any]", data)["is"]])(data)
        return plain(data)

    return tagged
