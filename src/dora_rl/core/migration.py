"""Move a request's KV cache, or prefill its tokens again? Decided by estimated time."""

from __future__ import annotations

from dora_rl.core.actions import How
from dora_rl.core.params import Params


def move_s(params: Params, num_tokens: int) -> float:
    cost = params.cost
    return cost.move_overhead_s + num_tokens * cost.kv_bytes_per_token / cost.link_bytes_per_s


def prefill_s(params: Params, num_tokens: int) -> float:
    return num_tokens / params.cost.prefill_tokens_per_s


def cheaper_way(params: Params, num_tokens: int) -> How:
    """KV where it is allowed and faster."""
    if params.kv_moves and move_s(params, num_tokens) <= prefill_s(params, num_tokens):
        return How.KV
    return How.PREFILL
