"""Compiles kernels.c once for a machine and loads it; None where that cannot be done.

The library is kept in the user's cache directory under a name made of the source, the flags, the
compiler and the processor, so that a home directory shared by unlike machines is safe. Nothing is
trusted: a loaded library must first agree with torch on an odd product, and with itself on rows
that stand alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC")
MACHINE_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
COMPILE_S_MAX = 120
HEAD_VECTORS = (1, 2, 4, 8, 16)  # head sizes in vectors that the attention is written for


class LayerPointers(Structure):
    """`Layer` in kernels.c."""

    _fields_ = [
        (name, c_void_p)
        for name in (
            "norm1", "qkv", "qkv_bias", "qk_norm", "o", "o_bias",
            "norm2", "gate_up", "gate_up_bias", "down", "down_bias",
        )
    ]  # fmt: skip


class ModelPointers(Structure):
    """`Model` in kernels.c."""

    _fields_ = [
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "dim")),
        *((name, c_int64) for name in ("inner", "vocab", "tied")),
        *((name, c_float) for name in ("eps", "scale")),
        *((name, c_void_p) for name in ("embed", "norm", "lm_head", "cos", "sin")),
        ("layers", POINTER(LayerPointers)),
    ]


class StepPointers(Structure):
    """`Step` in kernels.c."""

    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_segments", "table_width")),
        *((name, c_int64) for name in ("block_tokens", "num_blocks", "threads")),
        *((name, c_void_p) for name in ("token_ids", "positions", "table_rows", "table")),
        *((name, c_void_p) for name in ("logit_rows", "segments", "logit_segments", "kv")),
        *((name, c_void_p) for name in ("x", "h", "wide", "mixed", "score")),
        ("score_width", c_int64),
        ("logits", c_void_p),
    ]


class Kernels:
    """The functions of a loaded library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for function in (self._library.dora_lanes, self._library.dora_panel):
            function.restype = c_int64
        self.lanes: int = self._library.dora_lanes()
        self.panel: int = self._library.dora_panel()
        self._library.dora_sizes.restype = c_int64
        for which, structure in enumerate((LayerPointers, ModelPointers, StepPointers)):
            size = self._library.dora_sizes(c_int64(which))
            assert size == ctypes.sizeof(structure), "kernels.c and library.py differ"
        self.forward = self._function("dora_forward", "pp")
        self.draw = self._function("dora_draw", "piippppppppp")
        self._pack = self._function("dora_pack", "piip")
        self._linear = self._function("dora_linear", "piiipppiii")

    def pack(self, matrix: Tensor) -> None:
        """Rearrange a contiguous [N, K] matrix in place for `linear` and `forward`."""
        assert matrix.is_contiguous() and matrix.dtype == torch.float32
        num_out, num_in = matrix.shape
        copy = torch.empty(self.panel * num_in)
        self._pack(matrix.data_ptr(), num_out, num_in, copy.data_ptr())

    def linear(self, x: Tensor, packed: Tensor, threads: int = 1) -> Tensor:
        """x [rows, K] times a packed [N, K]."""
        rows, num_in = x.shape
        num_out = len(packed)
        out = torch.empty(rows, num_out)
        self._linear(
            x.data_ptr(), num_in, rows, num_in, packed.data_ptr(), None, out.data_ptr(), num_out,
            0, threads,
        )  # fmt: skip
        return out

    def takes(self, hidden: int, inner: int, head_dim: int) -> bool:
        """Whether a model of these widths can be computed."""
        whole = not (hidden % self.lanes or inner % self.lanes or head_dim % self.lanes)
        return whole and head_dim // self.lanes in HEAD_VECTORS

    def _function(self, name: str, kinds: str) -> ctypes._NamedFuncPointer:
        function = getattr(self._library, name)
        function.argtypes = [c_void_p if kind == "p" else c_int64 for kind in kinds]
        function.restype = None
        return function


@functools.cache
def load() -> Kernels | None:
    """The kernels of this machine; None without a compiler or where they are wrong."""
    path = build()
    if path is None:
        return None
    try:
        kernels = Kernels(path)
    except OSError:
        return None
    return kernels if agrees_with_torch(kernels) else None


def build(machine_flags: Sequence[Sequence[str]] = MACHINE_FLAGS) -> Path | None:
    """Where the compiled library is; compiles it, with the first flags that work, if it is not."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    version = _said(compiler, "--version")
    key = (SOURCE.read_text(), FLAGS, tuple(machine_flags), version, _processor())
    name = f"kernels-{blake2b(repr(key).encode(), digest_size=10).hexdigest()}.so"
    folder = _cache_folder()
    path = folder / name
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        for more in machine_flags:
            command = [compiler, *FLAGS, *more, "-o", str(made), str(SOURCE), "-lm"]
            if _runs(command):
                made.replace(path)  # another process may have been quicker; both are the same
                return path
    return None


def agrees_with_torch(kernels: Kernels) -> bool:
    """An odd product, against torch and against itself row by row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(29, 48, generator=generator)
    weight = torch.randn(kernels.panel * 2 + kernels.lanes + 3, 48, generator=generator)
    packed = weight.clone()
    kernels.pack(packed)
    got = kernels.linear(x, packed)
    alone = torch.cat([kernels.linear(row[None].contiguous(), packed) for row in x])
    return torch.allclose(got, x @ weight.t(), atol=1e-4) and torch.equal(got, alone)


def _cache_folder() -> Path:
    """The user's own cache directory, or a private one where that cannot be written."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dora-rl"
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(root, os.W_OK) and root.stat().st_uid == os.getuid():
            return root
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    return Path(tempfile.mkdtemp(prefix="dora-rl-"))


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _runs(command: list[str]) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMPILE_S_MAX)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
