"""Protocol buffers, as much of them as two messages of the SDK need: fields in, fields out.

Knows no message. A message is its fields, each a number and a value: a whole number, or bytes (of a
string, of another message, or as they are). Invariant: whatever bytes come in, reading them ends,
allocates no more than they are long, and raises nothing but `Malformed`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
INT64_MAX = (1 << 63) - 1


class Malformed(ValueError):
    """Not a protocol buffer, or not the message that it should be."""


class Field(NamedTuple):
    number: int
    kind: int
    value: int | bytes

    def bytes(self) -> bytes:
        if self.kind != BYTES or not isinstance(self.value, bytes):
            raise Malformed(f"field {self.number} has another type")
        return self.value

    def text(self) -> str:
        try:
            return self.bytes().decode()
        except UnicodeDecodeError:
            raise Malformed(f"field {self.number} is not UTF-8") from None

    def whole(self) -> int:
        """A signed whole number."""
        if self.kind != VARINT or not isinstance(self.value, int):
            raise Malformed(f"field {self.number} has another type")
        return self.value if self.value <= INT64_MAX else self.value - (1 << 64)

    def double(self) -> float:
        if self.kind != FIXED64 or not isinstance(self.value, bytes):
            raise Malformed(f"field {self.number} has another type")
        return struct.unpack("<d", self.value)[0]

    def wholes(self) -> list[int]:
        """One entry of a repeated number, or a packed list of them."""
        if self.kind == VARINT:
            return [self.whole()]
        data, at, found = self.bytes(), 0, []
        while at < len(data):
            value, at = _varint(data, at)
            found.append(value if value <= INT64_MAX else value - (1 << 64))
        return found


def fields(data: bytes) -> Iterator[Field]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not number:
            raise Malformed("a field has number 0")
        if kind == VARINT:
            value, at = _varint(data, at)
            yield Field(number, kind, value)
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise Malformed(f"field {number} has kind {kind}")
        if size > len(data) - at:
            raise Malformed(f"field {number} is cut off")
        yield Field(number, kind, data[at : at + size])
        at += size


def entry(data: bytes) -> tuple[str, Field | None]:
    """A key and a value of a map; a value that is all default is left out of the message."""
    key, value = "", None
    for field in fields(data):
        if field.number == 1:
            key = field.text()
        elif field.number == 2:
            value = field
    return key, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
        shift += 7
    raise Malformed("a number is cut off or too long")


# -- out ------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def put_whole(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def put_bytes(number: int, value: bytes) -> bytes:
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def put_text(number: int, value: str) -> bytes:
    return put_bytes(number, value.encode())


def put_double(number: int, value: float) -> bytes:
    return varint(number << 3 | FIXED64) + struct.pack("<d", value)


def put_wholes(number: int, values: Iterable[int]) -> bytes:
    """Packed."""
    return put_bytes(number, b"".join(map(varint, values)))


def put_entry(number: int, key: str, value: bytes) -> bytes:
    """Of a map; `value` is field 2, already written."""
    return put_bytes(number, put_text(1, key) + value)
