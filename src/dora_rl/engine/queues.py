"""The queues of one engine and the books they share: slots, device blocks, host blocks.

Pure: it records who is where and which cache operation makes it true, and performs none.
Invariant: a sequence is in exactly one queue, and only running ones own a slot.

    waiting   nothing in the cache: starts from its tokens
    running   owns a slot
    spilled   has its KV (on the host, or on the device if it just arrived) and wants a slot
    parked    put aside by the caller, KV kept
    idle      a session between two turns, KV kept until somebody needs the blocks
"""

from __future__ import annotations

from collections.abc import Iterator

from dora_rl.engine.blocks import BlockPool
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan, Scrub, Spill
from dora_rl.engine.sequence import Sequence, Status
from dora_rl.types import RequestId, UserError


class Queues:
    """Every sequence of an engine and what it holds."""

    def __init__(self, options: EngineOptions, num_blocks: int, positions_max: int) -> None:
        self.options, self.positions_max = options, positions_max
        self.block_tokens = options.block_tokens
        self.step_tokens_max = options.step_tokens_max  # fewer once memory has run out
        cached_max = options.prefix_blocks_max or max(1, num_blocks // 8)
        self.pool = BlockPool(num_blocks, cached_max if options.prefix_cache else 0)
        self.waiting: dict[RequestId, Sequence] = {}
        self.running: dict[RequestId, Sequence] = {}
        self.spilled: dict[RequestId, Sequence] = {}
        self.parked: dict[RequestId, Sequence] = {}
        self.idle: dict[RequestId, Sequence] = {}
        self._queues = (self.running, self.spilled, self.waiting, self.parked, self.idle)
        self.free_slots = list(range(options.seqs_max - 1, -1, -1))
        self.num_host_blocks = 0
        self.num_preemptions = 0
        self.num_prefix_tokens = 0

    def sequences(self) -> Iterator[Sequence]:
        for queue in self._queues:
            yield from queue.values()

    def find(self, request: RequestId) -> Sequence | None:
        return next((queue[request] for queue in self._queues if request in queue), None)

    def add(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self.waiting[seq.id] = seq

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, wherever it is; its blocks return to the pool."""
        self._take_out(seq)
        self.release_host(seq)
        self.release_blocks(seq)
        seq.status = Status.ENDED

    def keep_idle(self, seq: Sequence) -> None:
        """A turn ended; its blocks stay until the session continues, ends or spills."""
        self._take_out(seq)
        self._free_slot(seq)
        seq.status = Status.IDLE
        self.idle[seq.id] = seq

    def put_aside(self, plan: Plan, seq: Sequence, spill: bool) -> None:
        """Out of every queue, KV kept: on the device, or moved to the host when `spill`."""
        self._take_out(seq)
        seq.status = Status.PARKED
        self.parked[seq.id] = seq
        self._free_slot(seq)
        if spill and seq.blocks:
            self._to_host(plan, seq)

    def requeue(self, seq: Sequence) -> None:
        """Back from parked, idle or another engine: decodes again as soon as a slot is free."""
        self.parked.pop(seq.id, None)
        self.idle.pop(seq.id, None)
        has_kv = bool(seq.blocks or seq.num_host_blocks)
        seq.status = Status.SPILLED if has_kv else Status.WAITING
        insert_by_arrival(self.spilled if has_kv else self.waiting, seq)

    def reset(self, seq: Sequence) -> None:
        """Drop the KV; the sequence starts again from its tokens."""
        self._take_out(seq)
        self.release_host(seq)
        self.release_blocks(seq)
        seq.num_computed = 0
        seq.digests = []
        seq.status = Status.WAITING
        insert_by_arrival(self.waiting, seq)

    def take_back(self, plan: Plan) -> None:
        """A plan that was booked is not run. Before the tokens of earlier ones are read: prompt
        blocks that it would have filled must not become known as filled."""
        for span in plan.spans:
            span.seq.num_computed = span.start
        for op in plan.cache_ops:
            if isinstance(op, Scrub):
                self.pool.to_scrub.extend(op.blocks)

    def start_again(self, seq: Sequence) -> None:
        """From the tokens that are known; nothing of it is in flight."""
        idle = seq.status is Status.IDLE
        self.reset(seq)
        seq.num_tokens = len(seq.tokens)
        seq.num_scored = len(seq.logprobs)
        if idle:
            del self.waiting[seq.id]
            self.keep_idle(seq)

    def shrink(self, plan: Plan, reason: str) -> str:
        """A step of such rows did not fit. Returns what is done about it."""
        rows = plan.num_rows
        if rows < 2:
            raise UserError(
                f"out of memory in a step of {rows} rows ({reason}), and none is smaller; lower "
                "rollout.kv_bytes_max, rollout.versions_max or trainer.pack_tokens"
            )
        self.step_tokens_max = min(self.step_tokens_max, rows) // 2
        return (
            f"out of memory in a step of {rows:,} rows ({reason}); its requests start again from "
            f"their tokens and steps have {self.step_tokens_max:,} rows at most from now on"
        )

    def take_blocks(self, seq: Sequence, count: int) -> bool:
        """Blocks for an arriving request, leaving one for each running one; False: too few."""
        if self.pool.num_available < count + len(self.running):
            return False
        while len(seq.blocks) < count:
            block = self.pool.take()
            assert block is not None
            seq.blocks.append(block)
        return True

    def reserve_host(self, seq: Sequence, count: int) -> bool:
        if self.num_host_blocks + count > self.options.host_blocks_max:
            return False
        seq.num_host_blocks = count
        self.num_host_blocks += count
        return True

    def release_host(self, seq: Sequence) -> None:
        self.num_host_blocks -= seq.num_host_blocks
        seq.num_host_blocks = 0

    def spill(self, plan: Plan, seq: Sequence) -> None:
        """Out of the device: to the host if it has room, else dropped and computed again."""
        self._to_host(plan, seq)
        if seq.status is not Status.IDLE:
            del self.running[seq.id]
            self.requeue(seq)

    def _to_host(self, plan: Plan, seq: Sequence) -> None:
        num_used = -(-seq.num_computed // self.block_tokens)
        if num_used and self.reserve_host(seq, num_used):
            plan.cache_ops.append(Spill(seq, tuple(seq.blocks[:num_used])))
        else:
            seq.num_computed = 0
        self.release_blocks(seq)

    def release_blocks(self, seq: Sequence) -> None:
        self.pool.release(reversed(seq.blocks))
        seq.blocks = []
        seq.num_registered = 0
        self._free_slot(seq)

    def _take_out(self, seq: Sequence) -> None:
        for queue in self._queues:
            queue.pop(seq.id, None)

    def _free_slot(self, seq: Sequence) -> None:
        if seq.slot >= 0:
            self.free_slots.append(seq.slot)
            seq.slot = -1


def insert_by_arrival(queue: dict[RequestId, Sequence], seq: Sequence) -> None:
    """Keep a queue oldest first; a new arrival goes to the end without sorting."""
    last = next(reversed(queue.values()), None)
    queue[seq.id] = seq
    if last is not None and last.arrival > seq.arrival:
        ordered = sorted(queue.values(), key=lambda other: other.arrival)
        queue.clear()
        queue.update((other.id, other) for other in ordered)
