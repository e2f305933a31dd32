"""Counters and gauges of an engine, as one value."""

from __future__ import annotations

from dataclasses import dataclass


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
