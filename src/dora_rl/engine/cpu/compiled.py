"""Runs a plan's rows on the CPU in one call of kernels in C, compiled on the machine they run on.

Takes the place of `TorchRunner` where `usable` says so; that one is its oracle in the tests. Rows
need no padding: rows never depend on each other.

`load_kernels` compiles kernels.c once for a machine, and gives None where that cannot be done. The
library is kept in the user's cache directory under a name made of the source, the flags, the
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
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dora_rl.engine.cpu.attention import Ints
from dora_rl.engine.cpu.runner import Batch, CpuRunner
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Span
from dora_rl.engine.sequence import is_filtered
from dora_rl.engine.tensors import sampler
from dora_rl.engine.tensors.cache import KvCache
from dora_rl.engine.tensors.weights import ModelWeights
from dora_rl.model.directory import TensorSource
from dora_rl.model.rope import rope_tables
from dora_rl.model.spec import ModelSpec, RopeSpec

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-fno-math-errno", "-shared", "-fPIC")
MACHINE_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), ())
COMPILE_S_MAX = 120
HEAD_VECTORS = (1, 2, 4, 8, 16)  # head sizes in vectors that the attention is written for
QUERIES_MAX = 4  # query heads that the attention takes at once
PACKED = ("qkv", "o", "gate_up", "down")
PARAMETERS = (
    *("norm1", "qkv", "qkv_bias", "qk_norm", "o", "o_bias"),
    *("norm2", "gate_up", "gate_up_bias", "down", "down_bias", "post1", "post2"),
)


class LayerPointers(Structure):
    """`Layer` in kernels.c."""

    _fields_ = [
        *((name, c_void_p) for name in PARAMETERS),
        *((name, c_void_p) for name in ("cos", "sin")),
        ("window", c_int64),
    ]


class ModelPointers(Structure):
    """`Model` in kernels.c."""

    _fields_ = [
        *((name, c_int64) for name in ("num_layers", "hidden", "heads", "kv_heads", "dim")),
        *((name, c_int64) for name in ("inner", "vocab", "tied", "gelu", "qk_whole")),
        *((name, c_float) for name in ("eps", "scale", "embed_scale")),
        *((name, c_void_p) for name in ("embed", "norm", "lm_head")),
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
        self.lanes: int = self._function("dora_lanes", "", c_int64)()
        self.panel: int = self._function("dora_panel", "", c_int64)()
        size_of = self._function("dora_sizes", "i", c_int64)
        for which, structure in enumerate((LayerPointers, ModelPointers, StepPointers)):
            assert size_of(which) == ctypes.sizeof(structure), "kernels.c and compiled.py differ"
        self.forward = self._function("dora_forward", "pp")
        self.draw = self._function("dora_draw", "piippppppppp")
        self._pack = self._function("dora_pack", "piip")
        self._linear = self._function("dora_linear", "piiipppiii")

    def pack(self, matrix: Tensor) -> None:
        """Rearrange a contiguous [N, K] matrix in place for `linear` and `forward`."""
        assert matrix.is_contiguous() and matrix.dtype == torch.float32
        copy = torch.empty(self.panel * matrix.shape[1])
        self._pack(matrix.data_ptr(), *matrix.shape, copy.data_ptr())

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

    def _function(self, name: str, kinds: str, result: Any = None) -> ctypes._NamedFuncPointer:
        function = getattr(self._library, name)
        function.argtypes = [c_void_p if kind == "p" else c_int64 for kind in kinds]
        function.restype = result
        return function


@functools.cache
def load_kernels() -> Kernels | None:
    """The kernels of this machine; None without a compiler or where they are wrong."""
    path = build()
    try:
        kernels = None if path is None else Kernels(path)
    except OSError:
        return None
    return kernels if kernels and agrees_with_torch(kernels) else None


def build(machine_flags: Sequence[Sequence[str]] = MACHINE_FLAGS) -> Path | None:
    """Where the compiled library is; compiles it, with the first flags that work, if it is not."""
    if (compiler := shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")) is None:
        return None
    machine = (_output(compiler, "--version"), _processor())
    key = (SOURCE.read_text(), FLAGS, tuple(machine_flags), *machine)
    name = f"kernels-{blake2b(repr(key).encode(), digest_size=10).hexdigest()}.so"
    path = (folder := _cache_folder()) / name
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / name
        for more in machine_flags:
            if _output(compiler, *FLAGS, *more, "-o", str(made), str(SOURCE), "-lm") is not None:
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


def _output(*command: str) -> str | None:
    """What a command said; None where it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S_MAX)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def usable(spec: ModelSpec, options: EngineOptions) -> Kernels | None:
    """The kernels, where they are wanted, can be had, and know this kind of model."""
    dense = spec.moe is None and not options.lora_rank and options.dtype == "float32"
    kernels = load_kernels() if options.compiled_kernels and dense else None
    if kernels is None:
        return None
    lanes, dim = kernels.lanes, spec.head_dim
    whole = not (spec.hidden % lanes or spec.intermediate % lanes or dim % lanes)
    return kernels if whole and dim // lanes in HEAD_VECTORS else None


class CompiledRunner(CpuRunner):
    """Dense models in float32."""

    exact = True  # by construction; `agrees_with_torch` checks a product, the tests everything

    def __init__(self, spec: ModelSpec, options: EngineOptions, kernels: Kernels) -> None:
        super().__init__(spec, options)
        self._kernels = kernels
        self._tables = {
            rope: rope_tables(rope, spec.head_dim, self.context) for rope in spec.all_ropes()
        }
        self._model = _model_pointers(spec, self.weights, self._tables)
        self._scratch = _Scratch(spec, options.step_tokens_max, self.context, kernels.lanes)

    def load(self, slot: int, source: TensorSource, where: str) -> Iterator[str]:
        """Fill a slot layer by layer; a layer's matrices are packed once they are complete."""
        for group in self.weights.load_version(slot, source, where):
            for matrix in self._matrices(group):
                self._kernels.pack(matrix[slot])
            yield group

    def _matrices(self, group: str) -> list[Tensor]:
        if group.isdigit():
            return [getattr(self.weights.layers[int(group)], name) for name in PACKED]
        head = "embed" if self.spec.tied else "lm_head"
        return [self.weights.lm_head] if group == head else []

    def _forward(self, batch: Batch, cache: KvCache, table: Ints) -> Tensor:
        num_rows, scratch = len(batch.token_ids), self._scratch
        if num_rows > self.options.step_tokens_max:  # of a long text that is scored
            scratch = _Scratch(self.spec, num_rows, self.context, self._kernels.lanes)
        logits = torch.empty(len(batch.logit_rows), self.spec.vocab)
        step = StepPointers(
            num_rows=num_rows,
            num_segments=len(batch.segments),
            table_width=table.shape[1],
            block_tokens=self.options.block_tokens,
            num_blocks=cache.kv.shape[2],
            threads=torch.get_num_threads(),
            table=table.ctypes.data,
            kv=cache.kv.data_ptr(),
            logits=logits.data_ptr(),
            **{name: column.ctypes.data for name, column in batch._asdict().items()},
        )
        scratch.lend(step)
        self._kernels.forward(ctypes.byref(self._model), ctypes.byref(step))
        return logits

    def _draw(self, logits: Tensor, spans: Sequence[Span]) -> sampler.Drawn:
        """A token of each row; rows with filters or top log-probs are drawn by `sampler` instead.

        Which of the two draws is decided by the request alone, as everything about its tokens.
        """
        rows = sampler.logit_rows(spans)
        keys, positions, forced = (np.array(column, np.int64) for column in rows[:3])
        temperature = np.array([params.temperature for params in rows.owners], np.float32)
        count, vocab = logits.shape
        token, logprob = np.empty(count, np.int64), np.empty(count, np.float32)
        raw, scratch = np.empty(count, np.float32), self._scratch
        self._kernels.draw(
            logits.data_ptr(), count, vocab, keys.ctypes.data, positions.ctypes.data,
            temperature.ctypes.data, forced.ctypes.data, token.ctypes.data, logprob.ctypes.data,
            raw.ctypes.data, scratch.weight.data_ptr(), scratch.running.data_ptr(),
        )  # fmt: skip
        wants_raw = any(params.raw_logprobs for params in rows.owners)
        drawn = sampler.Drawn(
            torch.from_numpy(token),
            torch.from_numpy(logprob),
            torch.from_numpy(raw) if wants_raw else None,
        )
        special = [span for span in spans if _is_special(span)]
        return _overwrite(drawn, logits, spans, special) if special else drawn


class _Scratch:
    """Buffers for one pass of at most `num_rows` rows."""

    def __init__(self, spec: ModelSpec, num_rows: int, context: int, lanes: int) -> None:
        widths = {  # by the fields of a step
            "x": spec.hidden,
            "h": spec.hidden,
            "wide": max(spec.qkv_rows, 2 * spec.intermediate),
            "mixed": spec.num_heads * spec.head_dim,
        }
        self._rows = {name: torch.empty(num_rows, width) for name, width in widths.items()}
        self._score_width = QUERIES_MAX * (-(-context // lanes) * lanes)
        self._score = torch.empty(0)
        chunks = -(-spec.vocab // sampler.CHUNK)
        self.weight = torch.empty(chunks * sampler.CHUNK)
        self.running = torch.empty(chunks, dtype=torch.float64)

    def lend(self, step: StepPointers) -> None:
        if len(self._score) < step.threads * self._score_width:
            self._score = torch.empty(step.threads * self._score_width)
        for name, rows in self._rows.items():
            setattr(step, name, rows.data_ptr())
        step.score, step.score_width = self._score.data_ptr(), self._score_width


def _model_pointers(
    spec: ModelSpec, weights: ModelWeights, tables: Mapping[RopeSpec, tuple[Tensor, Tensor]]
) -> ModelPointers:
    """Addresses of all parameters; the tensors live as long as the runner."""
    layers = (LayerPointers * spec.num_layers)()
    for index, (layer, pointers) in enumerate(zip(weights.layers, layers, strict=True)):
        for name in PARAMETERS:
            parameter: Tensor | None = getattr(layer, name)
            setattr(pointers, name, None if parameter is None else parameter.data_ptr())
        pointers.cos, pointers.sin = (t.data_ptr() for t in tables[spec.rope_of(index)])
        pointers.window = spec.window_of(index)
    return ModelPointers(
        num_layers=spec.num_layers,
        hidden=spec.hidden,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        dim=spec.head_dim,
        inner=spec.intermediate,
        vocab=spec.vocab,
        tied=spec.tied,
        qk_whole=spec.qk_norm_whole,
        gelu=spec.activation == "gelu_tanh",
        eps=spec.norm_eps,
        scale=spec.scale,
        embed_scale=spec.embed_scale,
        embed=weights.embed.data_ptr(),
        norm=weights.norm.data_ptr(),
        lm_head=weights.lm_head.data_ptr(),
        layers=layers,
    )


def _is_special(span: Span) -> bool:
    params = span.seq.request.params
    return is_filtered(params) or params.logprobs_top_n > 0


def _overwrite(
    drawn: sampler.Drawn, logits: Tensor, spans: Sequence[Span], special: Sequence[Span]
) -> sampler.Drawn:
    """What `sampler` says of the special spans, in the place of what was drawn."""
    wanted = torch.cat([torch.full((span.num_logits,), _is_special(span)) for span in spans])
    there = sampler.sample(logits[wanted], sampler.sampling_rows(special))
    drawn.token_ids[wanted], drawn.logprobs[wanted] = there.token_ids, there.logprobs
    if drawn.raw_logprobs is not None and there.raw_logprobs is not None:
        drawn.raw_logprobs[wanted] = there.raw_logprobs
    if there.top_ids is not None and there.top_logprobs is not None:
        drawn.top_ids = torch.zeros(len(logits), there.top_ids.shape[1], dtype=torch.int64)
        drawn.top_logprobs = torch.zeros(drawn.top_ids.shape)
        drawn.top_ids[wanted], drawn.top_logprobs[wanted] = there.top_ids, there.top_logprobs
    return drawn
