"""Counters and gauges of an engine, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from dora_rl.engine.queues import Queues


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges; `free + used + cached == total` blocks, and `exact` says whether
    rows were measured not to depend on their batch mates."""

    free_blocks: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    host_blocks: int
    running: int
    waiting: int
    spilled: int
    parked: int
    idle: int
    kv_tokens: int
    steps: int
    decode_tokens: int
    prefill_tokens: int
    prefix_tokens: int
    preemptions: int
    exact: bool


def stats_of(
    queues: Queues, *, steps: int, decode_tokens: int, prefill_tokens: int, exact: bool
) -> EngineStats:
    counts = queues.pool.counts()
    return EngineStats(
        free_blocks=counts.free,
        used_blocks=counts.used,
        cached_blocks=counts.cached,
        total_blocks=counts.total,
        host_blocks=queues.num_host_blocks,
        running=len(queues.running),
        waiting=len(queues.waiting),
        spilled=len(queues.spilled),
        parked=len(queues.parked),
        idle=len(queues.idle),
        kv_tokens=sum(seq.num_computed for seq in queues.sequences() if seq.blocks),
        steps=steps,
        decode_tokens=decode_tokens,
        prefill_tokens=prefill_tokens,
        prefix_tokens=queues.num_prefix_tokens,
        preemptions=queues.num_preemptions,
        exact=exact,
    )
