"""Arrays beside a JSON header in one piece of bytes, no pickle: how messages and columns travel.

u32 header length | header JSON {..., "arrays": [[name, dtype, length], ...]} | bytes
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.io.codec import dumps, loads

_LENGTH = struct.Struct("<I")
_DTYPES = {"<i4", "<i8", "<f4", "<f8", "|u1"}


def pack_arrays(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """One-dimensional arrays; the header is what JSON can say."""
    shapes = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    text = dumps({**header, "arrays": shapes})
    parts = [_LENGTH.pack(len(text)), text]
    parts.extend(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return b"".join(parts)


def unpack_arrays(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    (length,) = _LENGTH.unpack_from(data)
    header, at = loads(data[4 : 4 + length]), 4 + length
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype, count in header["arrays"]:
        if dtype not in _DTYPES:
            raise ValueError(f"an array of type {dtype!r} does not travel")
        size = np.dtype(dtype).itemsize * count
        arrays[name] = np.frombuffer(data[at : at + size], dtype=dtype)
        at += size
    return header, arrays
