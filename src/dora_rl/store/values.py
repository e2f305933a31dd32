"""Values of the table and their bytes: a JSON header and the arrays as they lie in memory.

Never pads and never pickles. Invariant: what is decoded equals what was put, type and bits.

A value is a numpy array, bytes, or anything JSON can carry. A list or tuple of only ints or only
floats becomes an array (int32 where all fit, else int64; float64); an empty one is of ints. Arrays
are copied in and read-only after.

    body = 4 bytes H | H bytes of JSON header | the blobs of its arrays and byte strings, in order
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np

Value: TypeAlias = Any  # np.ndarray | bytes | str | int | float | bool | None | list | dict
Columns: TypeAlias = Mapping[str, Value]

HEADER = struct.Struct("<I")
# Smaller arrays are cheaper to copy than to refer to.
COPY_BYTES_MAX = 1 << 16
SCALARS = (str, int, float, bool, type(None))


def as_value(value: object) -> Value:
    """The form in which a value is kept. Raises TypeError for what cannot be kept."""
    if isinstance(value, np.ndarray):
        return _as_array(value)
    if isinstance(value, (tuple, list)):
        return _as_sequence(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, dict):
        return json.loads(json.dumps(value))  # also a copy, so that nobody can change it later
    raise TypeError(f"a table cannot hold {type(value).__name__}; give arrays, bytes or JSON")


def _as_array(value: np.ndarray) -> np.ndarray:
    if value.dtype.kind not in "iufb":
        raise TypeError(f"a table cannot hold arrays of {value.dtype}")
    copy = value.copy()
    copy.setflags(write=False)
    return copy


def _as_sequence(value: Sequence[object]) -> Value:
    kinds = set(map(type, value))
    if kinds == {float}:
        array = np.array(value, np.float64)
    elif kinds <= {int} and all(-(2**63) <= n < 2**63 for n in _extremes(value)):
        fits = all(-(2**31) <= n < 2**31 for n in _extremes(value))
        array = np.array(value, np.int32 if fits else np.int64)
    else:
        return json.loads(json.dumps(value))
    array.setflags(write=False)
    return array


def _extremes(value: Sequence[Any]) -> tuple[int, ...]:
    return (min(value), max(value)) if value else ()


def num_bytes_of(value: Value) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, (list, dict)):
        return len(json.dumps(value))
    return 8


def as_values(columns: Columns) -> dict[str, Value]:
    return {column: as_value(value) for column, value in columns.items()}


def num_bytes_of_all(values: Columns) -> int:
    total = 0
    for value in values.values():
        total += value.nbytes if type(value) is np.ndarray else num_bytes_of(value)
    return total


def describe_columns(columns: Columns, blobs: list[Any]) -> list[list[object]]:
    """The header's entry for one row; appends the row's blobs."""
    entries: list[list[object]] = []
    for name, value in columns.items():
        if isinstance(value, np.ndarray):
            small = value.nbytes <= COPY_BYTES_MAX
            blobs.append(value.tobytes() if small else value.reshape(-1).data.cast("B"))
            entries.append([name, _dtype_code(value.dtype), value.shape])
        elif isinstance(value, bytes):
            blobs.append(value)
            entries.append([name, "bytes", len(value)])
        else:
            entries.append([name, "json", value])
    return entries


@cache
def _dtype_code(dtype: np.dtype) -> str:
    return dtype.str


def read_columns(
    entries: Sequence[Sequence[Any]], body: memoryview, place: int
) -> tuple[dict[str, Value], int]:
    """The columns of one row, and where the next row's blobs begin."""
    columns: dict[str, Value] = {}
    for name, kind, detail in entries:
        if kind == "json":
            columns[name] = detail
        elif kind == "bytes":
            columns[name] = bytes(body[place : place + detail])
            place += detail
        else:
            # A copy, so that one small array does not keep a whole record in memory.
            array = np.frombuffer(body, kind, prod(detail), place).copy().reshape(detail)
            array.setflags(write=False)
            columns[name] = array
            place += array.nbytes
    return columns, place


def encode(header: Mapping[str, object], blobs: Sequence[Any]) -> list[Any]:
    """The buffers of one record's body."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return [HEADER.pack(len(text)) + text, *blobs]


def decode(body: memoryview) -> tuple[dict[str, Any], int]:
    """The header of a record's body, and where its blobs begin."""
    (size,) = HEADER.unpack_from(body)
    header = json.loads(bytes(body[HEADER.size : HEADER.size + size]))
    return cast(dict[str, Any], header), HEADER.size + size
