"""A message as one frame of a `connection`: a JSON header and raw arrays, no pickle.

What the messages of a run are is said in `workers.messages`.

    u32 header length | header JSON {"kind", "body", "arrays": [[name, dtype, length], ...]} | bytes
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.io.codec import dumps, loads

_LENGTH = struct.Struct("<I")
_DTYPES = {"<i4", "<i8", "<f4", "<f8", "|u1"}


@dataclass(frozen=True, slots=True)
class Message:
    """`kind` says what to do with `body`; one-dimensional arrays travel beside it as bytes."""

    kind: str
    body: dict[str, Any]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


def pack(kind: str, body: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    shapes = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    header = dumps({"kind": kind, "body": body, "arrays": shapes})
    parts = [_LENGTH.pack(len(header)), header]
    parts.extend(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return b"".join(parts)


def unpack(data: bytes) -> Message:
    (length,) = _LENGTH.unpack_from(data)
    header = loads(data[4 : 4 + length])
    arrays: dict[str, NDArray[Any]] = {}
    at = 4 + length
    for name, dtype, count in header["arrays"]:
        if dtype not in _DTYPES:
            raise ValueError(f"an array of type {dtype!r} does not travel")
        size = np.dtype(dtype).itemsize * count
        arrays[name] = np.frombuffer(data[at : at + size], dtype=dtype)
        at += size
    return Message(header["kind"], header["body"], arrays)
