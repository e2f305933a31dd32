"""The checksum that names a set of weights, whatever order or file they are stored in.

It is sha256 over the JSON list of (name, dtype, shape, sha256 of the bytes) of every tensor, sorted
by name, dtypes spelled as in safetensors. Never imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Protocol


class Digested(Protocol):
    """A tensor as far as its checksum goes."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def digest(self) -> str: ...


def checksum_of(tensors: Iterable[Digested]) -> str:
    rows = sorted((t.name, t.dtype, list(t.shape), t.digest) for t in tensors)
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
