"""Proof that what was loaded is what was published: checksum of the bytes, canary of the result.

The checksum of a version is sha256 over the JSON list of (name, dtype, shape, sha256 of the bytes)
of every tensor, sorted by name, dtypes spelled as in safetensors. It names the weights, not the
file they came in. The canary is a short text with the log-probs its publisher computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dora_rl.types import UserError

if TYPE_CHECKING:
    from dora_rl.ports import Canary, SealedWeights

_DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
# Float32 forwards of two programs differ by rounding alone; in bfloat16 every layer rounds.
CANARY_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.25}


class CheckedSource:
    """Reads a sealed version and hashes every tensor on its way through."""

    def __init__(self, sealed: SealedWeights) -> None:
        self._sealed = sealed
        self._rows: dict[str, tuple[str, str, list[int], str]] = {}

    def names(self) -> Sequence[str]:
        return self._sealed.names()

    def tensor(self, name: str) -> Tensor:
        data = self._sealed.tensor(name)
        self._hash(name, data)
        return data

    def check(self) -> None:
        """Raise unless the tensors read (and those nobody asked for) give the checksum."""
        for name in self._sealed.names():
            if name not in self._rows:
                self._hash(name, self._sealed.tensor(name))
        text = json.dumps(sorted(self._rows.values()), separators=(",", ":"))
        found = hashlib.sha256(text.encode()).hexdigest()
        if found != self._sealed.checksum:
            raise UserError(
                f"version {self._sealed.version}: loaded weights have checksum {found[:12]}, "
                f"published was {self._sealed.checksum[:12]}; publish the version again"
            )

    def _hash(self, name: str, data: Tensor) -> None:
        raw = data.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        code = _DTYPE_CODES.get(data.dtype, str(data.dtype))
        digest = hashlib.sha256(raw).hexdigest()
        self._rows[name] = (name, code, list(data.shape), digest)


def check_canary(
    canary: Canary, logprobs: Sequence[float], version: int, dtype: torch.dtype
) -> None:
    """Raise unless the loaded weights give the published log-probs."""
    gaps = [abs(a - b) for a, b in zip(canary.logprobs, logprobs, strict=True)]
    worst = max(gaps, default=0.0)
    if not worst <= CANARY_TOLERANCE[dtype]:
        raise UserError(
            f"version {version}: canary log-probs differ by {worst:.3g} "
            f"(allowed {CANARY_TOLERANCE[dtype]:.3g}); these are not the published weights"
        )
