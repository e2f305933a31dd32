"""What one engine is told: the section [rollout], resolved for one device.

Invariant: every buffer the engine allocates has its size here (or is derived once, from memory, at
start).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dora_rl.config import RolloutConfig
from dora_rl.model.spec import ModelSpec
from dora_rl.types import UserError
from dora_rl.user_code import require

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


class EngineOptions(RolloutConfig):
    """`EngineOptions()` is a small CPU engine in float32.

    num_blocks 0 derives the pool from `kv_bytes_max`; `kv_bytes_max` 0 takes 85 % of what is
    free of a GPU's memory, within `memory_share`, and 1 GiB on the CPU. `tile_rows` 0 measures the
    row-invariant tile.
    """

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"  # pyright: ignore[reportIncompatibleVariableOverride]
    memory_share: float = 1.0  # of a GPU that others use too: for weights and KV cache
    versions_max: int = Field(default=3, ge=1)
    record_routing: bool = False  # of a mixture: which experts each token went to
    lora_rank: int = 0  # versions are adapters of this rank on one base; 0: whole weights
    lora_head: bool = False  # adapters may have a part for the output matrix; on the CPU alone
    prefix_blocks_max: int = 0  # idle prompt blocks kept for reuse; 0 is an eighth of the pool
    tile_rows: int = 0

    def model_post_init(self, context: Any, /) -> None:
        tokens = self.block_tokens
        require(
            (
                tokens >= 16 and not tokens & (tokens - 1),
                f"rollout.block_tokens is {tokens}; use a power of two, 16 or more",
            ),
            (
                self.step_tokens_max >= self.seqs_max,
                f"rollout.step_tokens_max ({self.step_tokens_max}) is below seqs_max "
                f"({self.seqs_max}); a step must hold one row for every request",
            ),
            (
                not self.lora_head or (self.lora_rank and self.device == "cpu"),
                "adapters of the output matrix run on a CPU alone",
            ),
        )

    def context_limit(self, model_max: int) -> int:
        """Longest prompt plus response one request may have."""
        return self.context_max or min(model_max, 32_768)

    def check_model(self, spec: ModelSpec) -> None:
        """One line for a model that these options have no engine for."""
        on_gpu = self.device.startswith("cuda") and self.backend == "native"
        dim, context = spec.head_dim, self.context_limit(spec.context_max)
        require(
            (
                not on_gpu or not dim & (dim - 1),
                f"heads of {dim} numbers: the native engine computes powers of two on a GPU; "
                'set rollout.backend = "vllm"',
            ),
            (
                spec.rope.kind != "longrope" or context <= spec.context_max,
                f"rollout.context_max is {context}: with longrope scaling a text beyond "
                f"{spec.context_max} tokens would change its own beginning; set it to that",
            ),
        )

    def block_bytes(self, spec: ModelSpec) -> int:
        """Keys and values of one block over all layers, and what is recorded of its tokens."""
        return self.block_tokens * spec.kv_token_bytes(ITEM_BYTES[self.dtype], self.record_routing)

    def blocks_in(self, budget: int, spec: ModelSpec) -> int:
        """How many blocks so many bytes hold: at least two, or it is refused."""
        each = self.block_bytes(spec)
        if budget < 2 * each:
            raise UserError(
                f"rollout.kv_bytes_max: {budget} bytes hold {budget // each} KV blocks of "
                f"{each} bytes; give at least two"
            )
        return budget // each
