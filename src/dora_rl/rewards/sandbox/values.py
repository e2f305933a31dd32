"""Values between a program and its judge: plain data as JSON, nothing that could be executed.

`encode` runs in the program's process and may be lied to; `decode` runs outside, trusts nothing
and builds built-in types alone, so that no object of the program takes part in a comparison.
Only the standard library. Invariants: `decode(encode(x)) == x` for plain data; whatever `decode`
is given, it ends in a time that is near to linear in its size, or raises `BadValue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

DEPTH_MAX = 100
JSON_INT_MAX = 1 << 62  # beyond, hexadecimal: decimal digits take quadratic time
HEX_DIGITS_MAX = 1 << 18
SAME_HASH_MAX = 32


class NotPlain(Exception):
    """The value is, or holds, something other than plain data."""


class BadValue(ValueError):
    """The text is not what `encode` makes, or would take too long to make a value of."""


class Opaque:
    """An object of the program that is no plain data: it is true or false, and equal to nothing."""

    def __init__(self, kind: str, truth: bool) -> None:
        self.kind, self._truth = kind, truth

    def __bool__(self) -> bool:
        return self._truth

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def encode(value: Any, depth: int = DEPTH_MAX) -> Any:
    """As JSON: scalars as they are, everything else as a list that begins with its kind."""
    if value is None or value is True or value is False:
        return value
    if depth == 0:
        raise NotPlain("nested too deeply")
    for kind, tag in SEQUENCES.items():
        if isinstance(value, kind):
            return [tag, *(encode(entry, depth - 1) for entry in value)]
    if isinstance(value, dict):
        pairs = cast(dict[Any, Any], value).items()
        return ["dict", *(encode(entry, depth - 1) for pair in pairs for entry in pair)]
    return _encode_scalar(value, depth)


SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}


def _encode_scalar(value: Any, depth: int) -> Any:
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < JSON_INT_MAX else ["int", hex(number)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    # NumPy's integers and truth values are no Python ones, though programs return them as such.
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.item(), depth - 1)
    if type(value).__module__ in ("decimal", "fractions"):
        # As the number that it equals, if there is one.
        number = int(value) if value == int(value) else float(value)
        if number == value:
            return encode(number, depth - 1)
    raise NotPlain(type(value).__name__)


def decode(found: Any) -> object:
    """From what JSON made of the text."""
    try:
        return _decode(found, DEPTH_MAX)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadValue(str(error)) from error


def _decode(found: Any, depth: int) -> object:
    if found is None or isinstance(found, bool | int | float | str):
        return found
    if not isinstance(found, list) or not found or depth == 0:
        raise BadValue("no value")
    tag, *entries = cast(list[Any], found)
    if tag in _SCALARS:
        return _SCALARS[tag](*entries)
    if tag not in _CONTAINERS:
        raise BadValue("no such kind")
    return _CONTAINERS[tag]([_decode(entry, depth - 1) for entry in entries])


def _int(digits: Any) -> int:
    if not isinstance(digits, str) or len(digits) > HEX_DIGITS_MAX:
        raise BadValue("no integer")
    return int(digits, 16)


def _complex(real: Any, imaginary: Any) -> complex:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise BadValue("no complex number")
    return complex(real, imaginary)


def _dict(entries: list[Any]) -> dict[Any, Any]:
    if len(entries) % 2:
        raise BadValue("a key without a value")
    return dict(zip(spread(entries[::2]), entries[1::2], strict=True))


def spread(keys: list[Any]) -> Iterable[Any]:
    """Keys that all have one hash would make a table quadratic to fill."""
    counts = Counter(map(hash, keys))
    if counts and max(counts.values()) > SAME_HASH_MAX:
        raise BadValue("keys collide")
    return keys


_SCALARS: dict[Any, Callable[..., object]] = {
    "int": _int,
    "bytes": bytes.fromhex,
    "complex": _complex,
}
_CONTAINERS: dict[Any, Callable[[list[Any]], object]] = {
    "list": list,
    "tuple": tuple,
    "set": lambda entries: set(spread(entries)),
    "frozenset": lambda entries: frozenset(spread(entries)),
    "dict": _dict,
}
