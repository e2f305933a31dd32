"""Limits and choices of one engine, as plain values.

Never imports torch or pydantic, so that a benchmark can build one on a bare GPU machine. Invariant:
every buffer the engine allocates has its size here (or is derived once, from memory, at start).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dora_rl.types import UserError

if TYPE_CHECKING:
    from dora_rl.model.spec import ModelSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`EngineOptions()` is a small CPU engine in float32.

    num_blocks 0 derives the pool from `kv_bytes_max`; `kv_bytes_max` 0 takes 85 % of what is
    free of a GPU's memory, within `memory_share`, and 1 GiB on the CPU. `tile_rows` 0 measures the
    row-invariant tile.
    """

    device: str = "cpu"
    dtype: str = "float32"
    block_tokens: int = 64
    num_blocks: int = 0
    kv_bytes_max: int = 0
    memory_share: float = 1.0  # of a GPU that others use too: for weights and KV cache
    host_blocks_max: int = 4096  # blocks that spilled, parked and idle requests may hold
    seqs_max: int = 256  # requests that decode at once
    step_tokens_max: int = 2048  # rows of one step: decode rows plus prefill chunks
    context_max: int = 0  # 0: what the model was trained for, at most 32,768
    versions_max: int = 3
    lora_rank: int = 0  # versions are adapters of this rank on one base; 0: whole weights
    prefix_cache: bool = True
    prefix_blocks_max: int = 0  # idle prompt blocks kept for reuse; 0 is an eighth of the pool
    tile_rows: int = 0
    one_pass: bool = True  # all resident versions in one pass; False is the plain oracle
    compiled_kernels: bool = True  # on the CPU, where a C compiler is; otherwise torch
    cuda_graphs: bool = True
    async_steps: bool = True  # on a GPU: launch a step before the tokens of the last one are read
    burst_max: int = 8  # on a GPU: decode steps launched at once where the host is the slower one

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise UserError(
                f"rollout.dtype is {self.dtype!r}; the engine computes in float32 or bfloat16"
            )
        if self.block_tokens < 16 or self.block_tokens & (self.block_tokens - 1):
            raise UserError(
                f"rollout.block_tokens is {self.block_tokens}; use a power of two, 16 or more"
            )
        for name in ("seqs_max", "step_tokens_max", "versions_max", "burst_max"):
            if getattr(self, name) < 1:
                raise UserError(f"rollout.{name} is {getattr(self, name)}; it must be at least 1")
        if self.step_tokens_max < self.seqs_max:
            raise UserError(
                f"rollout.step_tokens_max ({self.step_tokens_max}) is below seqs_max "
                f"({self.seqs_max}); a step must hold one row for every request"
            )

    def context_limit(self, model_max: int) -> int:
        """Longest prompt plus response one request may have."""
        return self.context_max or min(model_max, 32_768)

    def block_bytes(self, spec: ModelSpec) -> int:
        """Keys and values of one block over all layers."""
        width = spec.num_kv_heads * spec.head_dim * ITEM_BYTES[self.dtype]
        return 2 * spec.num_layers * self.block_tokens * width

    def blocks_in(self, budget: int, spec: ModelSpec) -> int:
        """How many blocks so many bytes hold: at least two, or it is refused."""
        each = self.block_bytes(spec)
        if budget < 2 * each:
            raise UserError(
                f"rollout.kv_bytes_max: {budget} bytes hold {budget // each} KV blocks of "
                f"{each} bytes; give at least two"
            )
        return budget // each
