"""Proof that what was loaded is what was published: checksum of the bytes, canary of the result.

The checksum names the weights, not the file they came in. The canary is a short text with the
log-probs its publisher computed. An adapter also names the checksum of the base it belongs on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from dora_rl.model.checksum import checksum_of
from dora_rl.model.directory import TensorSource
from dora_rl.ports import Canary, SealedWeights
from dora_rl.types import BaseDiffers, UserError

_DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
# Float32 forwards of two programs differ by rounding alone; in bfloat16 every layer rounds.
CANARY_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.25, torch.float16: 0.25}


class Read(NamedTuple):
    """A tensor that was read; its digest may still be computed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hashed: Future[str]

    @property
    def digest(self) -> str:
        return self.hashed.result()


class CheckedSource:
    """Reads weights and hashes every tensor on its way through, or aside in threads."""

    def __init__(self, source: TensorSource, num_threads: int = 0) -> None:
        self._source = source
        self._read: dict[str, Read] = {}
        self._pool = ThreadPoolExecutor(num_threads, "hash") if num_threads else None
        self._checksum = ""

    def names(self) -> Sequence[str]:
        return self._source.names()

    def tensor(self, name: str) -> Tensor:
        data = self._source.tensor(name)
        code = _DTYPE_CODES.get(data.dtype, str(data.dtype))
        if self._pool is None:
            digest: Future[str] = Future()
            digest.set_result(_digest(data))
        else:
            digest = self._pool.submit(_digest, data)
        self._read[name] = Read(name, code, tuple(data.shape), digest)
        return data

    def checksum(self) -> str:
        """Of the tensors read, and of those nobody asked for; computed once."""
        for name in self._source.names() if not self._checksum else ():
            if name not in self._read:
                self.tensor(name)
        self._checksum = self._checksum or checksum_of(self._read.values())
        return self._checksum

    def check(self, sealed: SealedWeights) -> None:
        """Raise unless these are the tensors that were published."""
        if (found := self.checksum()) != sealed.checksum:
            raise UserError(
                f"version {sealed.version}: loaded weights have checksum {found[:12]}, "
                f"published was {sealed.checksum[:12]}; publish the version again"
            )

    def close(self) -> None:
        """No more threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _digest(data: Tensor) -> str:
    raw = data.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(raw).hexdigest()


def check_base(source: object, found: str, where: str) -> None:
    """Raise if an adapter belongs on another base than the one `found` here. Not where one of the
    two is unknown: whole weights have no base, and hashing may be switched off."""
    wanted: str = getattr(source, "base", "")
    if wanted and found and wanted != found:
        raise BaseDiffers(
            f"version {getattr(source, 'version', '?')} is an adapter for a base with checksum "
            f"{wanted[:12]}, {where} has {found[:12]}; model.path must hold the same weights on "
            "every host, and not change during a run"
        )


def check_canary(
    canary: Canary, logprobs: Sequence[float], version: int, dtype: torch.dtype
) -> None:
    """Raise unless the loaded weights give the published log-probs. `dtype` is the one that they
    were computed in here; the coarser of the two sides says how far they may differ."""
    theirs: torch.dtype = getattr(torch, canary.dtype) if canary.dtype else dtype
    allowed = max(CANARY_TOLERANCE[dtype], CANARY_TOLERANCE[theirs])
    pairs = zip(canary.logprobs, logprobs, strict=True)
    worst = max((abs(a - b) for a, b in pairs), default=0.0)
    if not worst <= allowed:
        raise UserError(
            f"version {version}: canary log-probs differ by {worst:.3g} "
            f"(allowed {allowed:.3g}); these are not the published weights"
        )
