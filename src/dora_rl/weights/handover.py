"""Versions on their way from the learner to instances on the same GPU, through its memory.

The learner keeps the version that it published last in one piece of device memory. From there it is
copied to the host while training goes on, and a file beside the sealed versions says where every
tensor lies, and two sums over all their bits. An instance that is told to load that version copies
it from there, which takes milliseconds, and then computes the sums of where it has read: the
learner may have gone on to the next version meanwhile. Where anything is amiss, the sealed version
in shared memory is loaded instead.

    learner    withdraw ─▶ fill ─▶ sums ─▶ offer (.handover)
    instance                                 open ─▶ copy ─▶ sums agree: loaded

Never shows a version before it is sealed: an instance asks for what the log has committed. Its
checksum, canary and base are those of the sealed version.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dora_rl.types import Version
from dora_rl.weights.format import SealedFile, WeightsError

OFFER = ".handover"
ALIGNED = 256  # bytes: where each tensor begins
NAMES_MAX = 1 << 16  # tensors that room is left for between
ROW = 1024  # numbers that are added up before their place counts


class Part(NamedTuple):
    """One tensor of a version that is offered."""

    begin: int
    dtype: str
    shape: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        kind: torch.dtype = getattr(torch, self.dtype)
        size = math.prod(self.shape) * kind.itemsize
        return memory[self.begin : self.begin + size].view(kind).view(self.shape)


class Memory(Protocol):
    """How device memory is made, named for other processes, and found by its name."""

    def make(self, num_bytes: int) -> tuple[Tensor, str]: ...
    def open(self, name: str, num_bytes: int) -> Tensor: ...
    def device(self) -> str:
        """What the device is called in every process."""
        ...


def sums_of(data_B: Tensor) -> tuple[int, int]:
    """Of bits: their sum, and one in which places count. Computed where they lie, in few passes: a
    GPU that trains and decodes begins every one of them late."""
    whole = data_B.numel() // (4 * ROW) * (4 * ROW)
    rows = data_B[:whole].view(torch.int32).view(-1, ROW).sum(1, dtype=torch.int64)
    rest = torch.zeros(4 * ROW, dtype=torch.uint8, device=data_B.device)
    rest[: data_B.numel() - whole] = data_B[whole:]
    rows = torch.cat([rows, rest.view(torch.int32).sum(dtype=torch.int64)[None]])
    places = torch.arange(1, rows.numel() + 1, device=data_B.device)
    first, second = torch.stack([rows.sum(), (rows * places).sum()]).tolist()
    return int(first), int(second)


@contextmanager
def beside(memory: Tensor) -> Iterator[None]:
    """What is computed within does not wait for other work on the device."""
    if not memory.is_cuda:
        yield
        return
    stream = _stream_of(memory.device)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


@lru_cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for good: the 33rd stream that a process makes is its first one again, on which an engine
    may capture a graph at this moment."""
    return torch.cuda.Stream(device)


class Shelf:
    """The learner's side. Implements `trainer.checkpoints.publish.Handover`."""

    def __init__(self, root: Path, num_bytes: int, memory: Memory | None = None) -> None:
        source = memory or DeviceMemory()
        self._offer, self._device = root / OFFER, source.device()
        self._memory, self._name = source.make(num_bytes + ALIGNED * NAMES_MAX)
        self.num_bytes = self._memory.nbytes
        self._version: Version = -1
        self._parts: dict[str, Part] = {}
        self._end, self._aside = 0, self.num_bytes

    def begin(self, version: Version) -> None:
        """What was offered is overwritten from here on."""
        self._offer.unlink(missing_ok=True)
        self._version, self._parts = version, {}
        self._end, self._aside = 0, self.num_bytes // ALIGNED * ALIGNED

    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """For a tensor of the version."""
        part = Part(self._end, str(dtype).removeprefix("torch."), tuple(shape))
        self._parts[name], place = part, part.of(self._memory)
        self._end += _aligned(place.nbytes)
        return place

    def aside(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """For what the learner alone reads again: from the end on, so that the version is in one
        piece."""
        self._aside -= _aligned(math.prod(shape) * dtype.itemsize)
        return Part(self._aside, str(dtype).removeprefix("torch."), tuple(shape)).of(self._memory)

    def offer(self) -> None:
        """All of it is there, and stays so until `begin`. In any thread."""
        with beside(self._memory):
            sums = sums_of(self._memory[: self._end])
        said = {
            "version": self._version,
            "device": self._device,
            "memory": self._name,
            "num_bytes": self.num_bytes,
            "end": self._end,
            "sums": sums,
            "parts": self._parts,
        }
        temporary = self._offer.with_name(f"{OFFER}-{os.getpid()}")
        temporary.write_text(json.dumps(said))
        temporary.rename(self._offer)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED


class HandedOver:
    """A version in device memory. Implements `ports.SealedWeights`, and checks itself."""

    def __init__(
        self, sealed: SealedFile, memory: Tensor, parts: dict[str, Part], sums: Sequence[int]
    ) -> None:
        """`memory`: as far as the version goes."""
        self._sealed, self._memory, self._parts, self._sums = sealed, memory, parts, tuple(sums)
        self.version, self.checksum = sealed.version, sealed.checksum
        self.canary, self.base = sealed.canary, sealed.base

    def names(self) -> Sequence[str]:
        return self._sealed.names()

    def tensor(self, name: str) -> Tensor:
        return self._parts[name].of(self._memory)

    def check(self) -> None:
        """Raise unless what was copied before this is the version that was offered."""
        with beside(self._memory):
            same = sums_of(self._memory) == self._sums
        if not same:
            raise WeightsError(
                f"version {self.version} on the device was replaced while it was copied"
            )


class Handovers:
    """An instance's side. `memory` None: this process has no part in it."""

    def __init__(self, root: Path, memory: Memory | None) -> None:
        self._offer, self._memory = root / OFFER, memory
        self._opened: tuple[str, Tensor] | None = None

    def find(self, sealed: SealedFile) -> HandedOver | None:
        """The version in device memory, if it is offered there right now."""
        if self._memory is None:
            return None
        try:
            said: dict[str, Any] = json.loads(self._offer.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        if (said["version"], said["device"]) != (sealed.version, self._memory.device()):
            return None
        parts = {
            name: Part(begin, dtype, tuple(shape))
            for name, (begin, dtype, shape) in said["parts"].items()
        }
        if parts.keys() != set(sealed.names()):
            return None
        if self._opened is None or self._opened[0] != said["memory"]:
            self._opened = None
            opened = self._memory.open(said["memory"], said["num_bytes"])
            self._opened = said["memory"], opened
        return HandedOver(sealed, self._opened[1][: said["end"]], parts, said["sums"])


# -- memory of a GPU ------------------------------------------------------------------------------


class _Array:
    """Device memory as other libraries describe it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class DeviceMemory:
    """Of the current device, by CUDA's handles between processes. Not torch's own memory: that
    grows in segments, which have no such handle everywhere. Raises `WeightsError` where CUDA
    refuses. What is made or opened is never given back before the process ends."""

    def __init__(self) -> None:
        torch.empty(1, device="cuda")  # the context that the calls below are made in
        self._runtime: Any = import_module("cuda.bindings.runtime")

    @staticmethod
    def is_here() -> bool:
        has_cuda = torch.cuda.is_available() and find_spec("cuda") is not None
        return has_cuda and find_spec("cuda.bindings") is not None

    def device(self) -> str:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def make(self, num_bytes: int) -> tuple[Tensor, str]:
        address = self._checked(self._runtime.cudaMalloc(num_bytes))
        handle = self._checked(self._runtime.cudaIpcGetMemHandle(address))
        return self._tensor(address, num_bytes), bytes(handle.reserved).hex()

    def open(self, name: str, num_bytes: int) -> Tensor:
        handle = self._runtime.cudaIpcMemHandle_t()
        handle.reserved = bytes.fromhex(name)
        lazily = self._runtime.cudaIpcMemLazyEnablePeerAccess
        address = self._checked(self._runtime.cudaIpcOpenMemHandle(handle, lazily))
        return self._tensor(address, num_bytes)

    def _tensor(self, address: Any, num_bytes: int) -> Tensor:
        return torch.as_tensor(_Array(int(address), num_bytes), device="cuda")

    def _checked(self, result: Sequence[Any]) -> Any:
        if int(result[0]):
            self._runtime.cudaGetLastError()  # or the next launch would report it
            raise WeightsError(f"CUDA cannot share memory between processes: {result[0].name}")
        return result[1]
