"""One sealed version as files: a plain safetensors file and a JSON manifest beside it.

Never knows of stores, windows or retirement, and never pickles. Invariant: every byte of
`model.safetensors` is covered by a digest in `manifest.json`, and the version's checksum is a hash
over (name, dtype, shape, digest) of every tensor, so that it names the weights and not the layout:
a copy on disk, in shared memory or on another host has the same checksum.

    model.safetensors   8 bytes N | N bytes of JSON header, padded with spaces | tensors, no gaps
    manifest.json       version, checksum, canary, base (what an adapter belongs on, as checksum),
                        and per tensor: name dtype shape begin end digest
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.model.checksum import checksum_of
from dora_rl.ports import Canary
from dora_rl.types import UserError, Version
from dora_rl.weights.private import lock_now

if TYPE_CHECKING:
    from torch import Tensor

TENSORS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
FORMAT = 1
NUM_THREADS = min(16, len(os.sched_getaffinity(0)))  # that hash or copy tensors of one version

# safetensors' names of the types, and torch's.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}


class WeightsError(Exception):
    """A weight store could not do what was asked. The message names the version and the file."""


class WeightsCorrupt(WeightsError, UserError):
    """The bytes of a sealed version are not the ones that were published."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `begin` and `end` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was published, and the proof of it."""

    version: Version
    checksum: str
    data_start: int
    header_digest: str
    tensors: tuple[TensorEntry, ...]
    canary: Canary | None = None
    base: str = ""  # of an adapter: the checksum of what it belongs on

    @property
    def num_bytes(self) -> int:
        return self.data_start + (self.tensors[-1].end if self.tensors else 0)


def digest_of(data: memoryview | bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal_of(body: object) -> str:
    """A hash of the manifest itself, so that a damaged offset or canary is noticed as such."""
    return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()


def read_manifest(directory: Path, version: Version) -> Manifest:
    """Parse the manifest and check it against its own seal."""
    path = directory / MANIFEST_FILE
    try:
        sealed = json.loads(path.read_bytes())
        if sealed["format"] != FORMAT:
            raise WeightsError(f"version {version}: {path} has format {sealed['format']}")
        raw = sealed["manifest"]
        intact = sealed["seal"] == seal_of(raw)
        entries = tuple(
            TensorEntry(
                str(t["name"]),
                str(t["dtype"]),
                tuple(int(n) for n in t["shape"]),
                int(t["begin"]),
                int(t["end"]),
                str(t["digest"]),
            )
            for t in raw["tensors"]
        )
        canary = raw["canary"] and Canary(
            tuple(raw["canary"]["token_ids"]),
            tuple(raw["canary"]["logprobs"]),
            str(raw["canary"].get("dtype", "")),
        )
        manifest = Manifest(
            int(raw["version"]),
            str(raw["checksum"]),
            int(raw["data_start"]),
            str(raw["header_digest"]),
            entries,
            canary,
            str(raw.get("base", "")),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsCorrupt(f"version {version}: {path} is unreadable ({error})") from error
    if not intact or manifest.version != version or manifest.checksum != checksum_of(entries):
        raise WeightsCorrupt(f"version {version}: {path} does not match its own seal")
    return manifest


class SealedFile:
    """One version, mapped. Implements `ports.SealedWeights`.

    The mapping is private: tensors are views of the shared pages with no copy, and a write by
    mistake would land in this process's own copy of the page, never in the sealed version.
    """

    def __init__(self, directory: Path, version: Version, *, lock: bool = False) -> None:
        """`lock`: say that this memory is looked at, for as long as it is. Raises
        `FileNotFoundError` where the version was retired meanwhile."""
        self.path = directory / TENSORS_FILE
        self.manifest = manifest = read_manifest(directory, version)
        self.version, self.checksum = manifest.version, manifest.checksum
        self.canary, self.base = manifest.canary, manifest.base
        self.num_bytes, self.files = manifest.num_bytes, (self.path,)
        self._entries = {t.name: t for t in self.manifest.tensors}
        self.pinned: Any = None  # the same bytes from the first on, where a GPU knows them
        with self.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if lock:
                _lock_shared(file.fileno(), self.path)
            # Changes whenever another file takes the name or somebody writes to this one.
            self.stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
            size = stat.st_size
            if size != self.manifest.num_bytes:
                raise WeightsCorrupt(
                    f"version {version}: {self.path} has {size} bytes, "
                    f"{self.manifest.num_bytes} were published"
                )
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def names(self) -> Sequence[str]:
        """Layer by layer: what stood before the layers, layer 0, 1, …, what stood after."""
        return layer_order([t.name for t in self.manifest.tensors])

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped bytes. (A copy only where the bytes are not aligned to the type.)"""
        import torch

        entry = self._entries[name]
        dtype: torch.dtype = getattr(torch, DTYPES[entry.dtype])
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        start = self.manifest.data_start + entry.begin
        count = (entry.end - entry.begin) // dtype.itemsize
        if start % dtype.itemsize:
            data = bytearray(self.bytes_of(entry))
            return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)
        known = self.pinned is not None and start + entry.end - entry.begin <= len(self.pinned)
        source = self.pinned if known else self._map
        flat = torch.frombuffer(source, dtype=dtype, count=count, offset=start)
        return flat.reshape(entry.shape)

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        for name in self.names():
            yield name, self.tensor(name)

    def file_bytes(self) -> memoryview:
        """The whole safetensors file, also after the version was retired."""
        return memoryview(self._map)

    def header(self) -> memoryview:
        """What stands before the tensors in the file."""
        return memoryview(self._map)[: self.manifest.data_start]

    def check_header(self) -> None:
        """For readers that hash the tensors themselves: what others find them by."""
        if digest_of(self.header()) != self.manifest.header_digest:
            raise WeightsCorrupt(f"version {self.version}: the header of {self.path} changed")

    def verify(self) -> None:
        """Hash every byte again and compare with what was published."""
        self.check_header()
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights-hash") as pool:
            digests = pool.map(lambda t: digest_of(self.bytes_of(t)), self.manifest.tensors)
            bad = [
                t.name
                for t, digest in zip(self.manifest.tensors, digests, strict=True)
                if digest != t.digest
            ]
        if bad:
            raise WeightsCorrupt(
                f"version {self.version}: {self.path} changed after publication "
                f"(tensor {bad[0]}{f' and {len(bad) - 1} more' if bad[1:] else ''})"
            )

    def bytes_of(self, entry: TensorEntry) -> memoryview:
        """The bytes of one tensor, as they are mapped."""
        start = self.manifest.data_start
        return memoryview(self._map)[start + entry.begin : start + entry.end]


def check_committed(sealed: SealedFile, committed: str) -> None:
    """Raise unless a version is the one that the log committed; "": the log does not say."""
    if committed and sealed.checksum != committed:
        raise WeightsCorrupt(
            f"version {sealed.version}: {sealed.path} has checksum {sealed.checksum[:12]}, the log "
            f"committed {committed[:12]}"
        )


def _lock_shared(handle: int, path: Path) -> None:
    """The lock lives as long as a mapping of the file. Where the file is being filled again, or has
    been, it has no name any more."""
    locked = lock_now(handle, fcntl.LOCK_SH)
    if not locked or not os.path.samestat(os.stat(path), os.fstat(handle)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def layer_order(names: Sequence[str]) -> list[str]:
    """Stable order by layer number (the first number in a dotted name).

    >>> layer_order(["embed", "layers.10.q", "layers.2.q", "norm"])
    ['embed', 'layers.2.q', 'layers.10.q', 'norm']
    """
    layers = [next((int(p) for p in name.split(".") if p.isdigit()), None) for name in names]
    first = next((i for i, layer in enumerate(layers) if layer is not None), len(names))

    def place(i: int) -> tuple[int, int]:
        layer = layers[i]
        return (1, layer) if layer is not None else (0 if i < first else 2, 0)

    return [names[i] for i in sorted(range(len(names)), key=place)]
