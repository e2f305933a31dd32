"""Decides what the next step runs. Pure: returns a plan, performs nothing, imports no torch.

Oldest first. Every running request gets its decode row; what is left of the step's token budget
goes to prefill chunks of running requests, then to spilled and waiting ones as they fit. When no
block is left, idle sessions spill first, then the youngest running request does, so the oldest one
always finishes. A request whose prompt another one is prefilling right now waits for those blocks
instead of computing them again.

A plan may be a burst: several decode steps at once, where nothing but decoding is to be done. It
may run past a request's last token, which is found out only when the tokens are read; what lies
behind it is dropped.

The plan's cache operations are performed in the order they were decided; each of them is right for
the cache content at that point. Invariant: a plan never writes a block that somebody else holds.

Pure, too, in its books: it records who is where and which cache operation makes it true. Invariant:
a sequence is in exactly one queue, and only running ones own a slot.

    waiting   nothing in the cache: starts from its tokens
    running   owns a slot
    spilled   has its KV (on the host, or on the device if it just arrived) and wants a slot
    parked    put aside by the caller, KV kept
    idle      a session between two turns, KV kept until somebody needs the blocks
"""

from __future__ import annotations

from collections.abc import Iterator

from dora_rl.engine.blocks import BlockPool, block_digests
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Copy, Plan, Restore, Scrub, Span, Spill
from dora_rl.engine.sequence import Sequence, Status
from dora_rl.types import RequestId, UserError


def rows_of(plan: Plan) -> int:
    """Of all its spans."""
    return sum(span.num_rows for span in plan.spans)


class Scheduler:
    """Every sequence of an engine, what it holds, and what the next step does with it."""

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
        self._queues = {
            Status.RUNNING: self.running,
            Status.SPILLED: self.spilled,
            Status.WAITING: self.waiting,
            Status.PARKED: self.parked,
            Status.IDLE: self.idle,
        }
        self.free_slots = list(range(options.seqs_max - 1, -1, -1))
        self.num_host_blocks = self.num_preemptions = self.num_prefix_tokens = 0

    def sequences(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue.values()

    def find(self, request: RequestId) -> Sequence | None:
        return next((queue[request] for queue in self._queues.values() if request in queue), None)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence, wherever it is; its blocks return to the pool."""
        self._drop(seq)
        seq.status = Status.ENDED

    def keep_idle(self, seq: Sequence) -> None:
        """A turn ended; its blocks stay until the session continues, ends or spills."""
        self._free_slot(seq)
        self._put(seq, Status.IDLE)

    def put_aside(self, plan: Plan, seq: Sequence, spill: bool) -> None:
        """Out of every queue, KV kept: on the device, or moved to the host when `spill`."""
        self._free_slot(seq)
        self._put(seq, Status.PARKED)
        if spill and seq.blocks:
            self._to_host(plan, seq)

    def requeue(self, seq: Sequence) -> None:
        """New, back from parked or idle, or from another engine: decodes once a slot is free."""
        has_kv = seq.blocks or seq.num_host_blocks
        self._put(seq, Status.SPILLED if has_kv else Status.WAITING)

    def reset(self, seq: Sequence) -> None:
        """Drop the KV; the sequence starts again from its tokens."""
        self._drop(seq)
        seq.num_computed = 0
        seq.digests = ()
        self._put(seq, Status.WAITING)

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
            self.keep_idle(seq)

    def shrink(self, plan: Plan, reason: str) -> str:
        """A step of such rows did not fit. Returns what is done about it."""
        if (rows := rows_of(plan)) < 2:
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
        seq.blocks += self._take_available(count - len(seq.blocks))
        return True

    def _take_available(self, count: int) -> list[int]:
        """So many blocks, which the caller knows to be there."""
        blocks = [self.pool.take() for _ in range(count)]
        assert None not in blocks
        return [block for block in blocks if block is not None]

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

    def _drop(self, seq: Sequence) -> None:
        """Out of every queue, with nothing in the cache."""
        self._take_out(seq)
        self.release_host(seq)
        self.release_blocks(seq)

    def _take_out(self, seq: Sequence) -> None:
        for queue in self._queues.values():
            queue.pop(seq.id, None)

    def _put(self, seq: Sequence, status: Status) -> None:
        """Into the queue of `status`: oldest arrival first; what is put aside or idle, last."""
        self._take_out(seq)
        seq.status, queue = status, self._queues[status]
        last = next(reversed(queue.values()), seq)
        queue[seq.id] = seq
        if last.arrival > seq.arrival and status not in (Status.PARKED, Status.IDLE):
            ordered = sorted(queue.values(), key=lambda other: other.arrival)
            queue.clear()
            queue.update((other.id, other) for other in ordered)

    def _free_slot(self, seq: Sequence) -> None:
        if seq.slot >= 0:
            self.free_slots.append(seq.slot)
            seq.slot = -1

    # -------------------------------------------------------------------- plan

    def plan(self, burst_max: int = 1) -> Plan:
        """The next step, or a burst of up to `burst_max` steps."""
        if burst_max > 1 and (steps := self._burst_steps(burst_max)) > 1:
            return self._plan_burst(steps)
        plan = Plan()
        if self.pool.to_scrub:
            plan.cache_ops.append(Scrub(tuple(self.pool.to_scrub)))
            self.pool.to_scrub.clear()
        budget = self.step_tokens_max
        before = self.num_preemptions
        num_decode_left = len(self.running)
        for seq in list(self.running.values()):
            num_decode_left -= 1
            if seq.status is not Status.RUNNING:
                continue  # pre-empted for an older one, a moment ago
            if (span := self._steady(seq)) is not None:
                plan.spans.append(span)
                budget -= 1
            else:
                budget -= self._plan_running(plan, seq, budget - num_decode_left)
        if self.num_preemptions == before and (self.spilled or self.waiting):
            self._admit(plan, budget)
        assert self.num_preemptions == before or all(
            span.seq.status is Status.RUNNING for span in plan.spans
        ), "a request was pre-empted after its row was planned"
        return plan

    def _steady(self, seq: Sequence) -> Span | None:
        """The next row of a request that decodes inside a block of its own, which is nearly every
        row there is; the same as `_plan_running`, in fewer operations."""
        start = seq.num_computed
        end = start + 1
        num_response = end - seq.num_prompt
        if seq.num_tokens != end or num_response != seq.num_scored:
            return None
        index = start // self.block_tokens
        if num_response >= seq.response_max or index >= len(seq.blocks):
            return None
        if self.pool.refs[seq.blocks[index]] != 1:
            return None
        seq.num_computed = end
        seq.num_tokens = end + 1
        seq.num_scored = num_response + 1
        return Span(seq, start, 1, start, 1, True)

    def _burst_steps(self, steps: int) -> int:
        """How many steps can be planned at once: every request that runs decodes plainly in blocks
        of its own, nobody waits, and there is room without pre-empting anyone. Otherwise 1."""
        if self.spilled or self.waiting or self.pool.to_scrub:
            return 1
        num_left = num_blocks = 0
        for seq in self.running.values():
            start = seq.num_computed
            num_response = start + 1 - seq.num_prompt
            if seq.num_tokens != start + 1 or num_response != seq.num_scored or not seq.plain:
                return 1
            if num_response >= seq.response_max:
                continue  # its last token is in flight
            index = start // self.block_tokens
            if index < len(seq.blocks) and self.pool.refs[seq.blocks[index]] != 1:
                return 1
            num_left = max(num_left, seq.response_max - num_response)
            steps = min(steps, self.positions_max - start)
            num_blocks += max(0, -(-(start + steps) // self.block_tokens) - len(seq.blocks))
        return min(steps, num_left) if num_blocks <= self.pool.num_available else 1

    def _plan_burst(self, steps: int) -> Plan:
        plan = Plan(repeat=steps)
        for seq in self.running.values():
            start, num_response = seq.num_computed, seq.num_computed + 1 - seq.num_prompt
            if num_response >= seq.response_max:
                continue
            if start + steps > len(seq.blocks) * self.block_tokens:
                grown = self._grow(plan, seq, start + steps)
                assert grown, "a burst pre-empts nobody"
            seq.num_computed += steps
            seq.num_tokens += steps
            seq.num_scored += steps
            plan.spans.append(Span(seq, start, 1, start, 1, True))
        return plan

    def plan_guesses(self, steps: int, each: int, pending: list[int]) -> Plan | None:
        """A burst in which every request that runs may go on by as many as `each` tokens a step, as
        far as there are blocks; such bursts of `pending` steps are not read yet. None where
        something else is to be done. Blocks are taken, but no token is booked: who reads them
        does."""
        if self.spilled or self.pool.to_scrub or (self.waiting and self.free_slots):
            return None
        all_steps = steps + sum(pending)
        for reach in (all_steps * each, all_steps + (len(pending) + 1) * each):
            ends = [self._guessed_end(seq, reach) for seq in self.running.values()]
            if None in ends:
                return None
            pairs = [(seq, end or 0) for seq, end in zip(self.running.values(), ends, strict=True)]
            num_blocks = sum(
                max(0, -(-end // self.block_tokens) - len(seq.blocks)) for seq, end in pairs
            )
            if num_blocks <= self.pool.num_available:
                return self._plan_guesses(pairs, steps, sum(pending))
        return None

    def _guessed_end(self, seq: Sequence, reach: int) -> int | None:
        """The position that a request may come to; None where it does not plainly decode in blocks
        of its own."""
        start = seq.num_computed
        is_scored = start + 1 - seq.num_prompt == seq.num_scored
        if seq.num_tokens != start + 1 or not is_scored or not seq.plain:
            return None
        index = start // self.block_tokens
        if any(self.pool.refs[block] != 1 for block in seq.blocks[index:]):
            return None
        last = seq.num_prompt + seq.response_max - 1
        return min(start + reach, last, self.positions_max)

    def _plan_guesses(
        self, pairs: list[tuple[Sequence, int]], steps: int, pending_steps: int
    ) -> Plan:
        plan = Plan(repeat=steps)
        for seq, end in pairs:
            start = seq.num_computed
            if start + pending_steps >= seq.num_prompt + seq.response_max - 1:
                continue  # its last token is in flight
            if end > len(seq.blocks) * self.block_tokens:
                grown = self._grow(plan, seq, end)
                assert grown, "guesses pre-empt nobody"
            plan.spans.append(Span(seq, start, 1, start, 1, True))
        return plan if plan.spans else Plan()  # nobody goes on: what is in flight is to be read

    def add_drafts(self, plan: Plan, index: int, drafts: tuple[int, ...]) -> int:
        """Guesses behind the token of a span that decodes one row: as many as its response and the
        blocks that nobody needs now have room for. Returns how many rows they are.

        They are not booked: what was drawn is known before the next plan, and whoever reads it
        books what counts.
        """
        span = plan.spans[index]
        seq, end = span.seq, span.start + 1
        drafts = drafts[: seq.response_max - (end - seq.num_prompt) - 1]
        num_blocks = -(-(end + len(drafts)) // self.block_tokens) - len(seq.blocks)
        if not drafts or num_blocks > max(0, self.pool.num_available - len(self.running)):
            return 0
        grown = self._grow(plan, seq, end + len(drafts))
        assert grown, "drafts pre-empt nobody"
        num_rows = 1 + len(drafts)
        plan.spans[index] = span._replace(num_rows=num_rows, num_logits=num_rows, drafts=drafts)
        return len(drafts)

    def _plan_running(self, plan: Plan, seq: Sequence, budget: int) -> int:
        todo = seq.num_tokens - seq.num_computed
        num_response = seq.num_tokens - seq.num_prompt
        scored = seq.num_scored >= num_response
        if todo <= 0 or (todo == 1 and num_response >= seq.response_max and scored):
            return 0  # its last token is in flight
        count = min(todo, max(1, budget))
        if not self._grow(plan, seq, seq.num_computed + count):
            return 0
        plan.spans.append(self._advance(seq, count))
        return count

    def _advance(self, seq: Sequence, count: int) -> Span:
        """Book the rows as done: later plans build on them before their tokens are known."""
        start, end = seq.num_computed, seq.num_computed + count
        seq.num_computed = end
        # Row at position p predicts the token at p + 1. Logits are needed from the row before the
        # first unscored response token on.
        first = max(start, seq.num_prompt + seq.num_scored - 1)
        sample = end == seq.num_tokens and end - seq.num_prompt < seq.response_max
        last = end if end < seq.num_tokens or sample else end - 1
        num_logits = max(0, last - first)
        seq.num_scored += num_logits
        if sample:
            seq.num_tokens += 1
        return Span(seq, start, count, first, num_logits, sample)

    def _admit(self, plan: Plan, budget: int) -> None:
        prefilling = {
            (seq.version, seq.digests[-1])
            for seq in self.running.values()
            if seq.digests and seq.num_computed < seq.num_prompt
        }
        # Those that hold device blocks go first: they need no room, and give theirs back sooner.
        queue = sorted(self.spilled.values(), key=lambda seq: not seq.blocks)
        for seq in [*queue, *self.waiting.values()]:
            if budget <= 0 or not self.free_slots:
                return
            if len(seq.tokens) < seq.num_tokens:
                return  # its newest token is still in flight
            if seq.status is Status.SPILLED:
                # Growing must not pre-empt a request whose row is in this plan already.
                if (
                    seq.blocks
                    and self.running
                    and not self._make_room(plan, self._growth(seq, budget))
                ):
                    return
                if not seq.blocks and not self._restore(plan, seq):
                    return
            else:
                if self.options.prefix_cache:
                    if not seq.digests:
                        prompt = seq.tokens[: seq.num_prompt]
                        seq.digests = block_digests(seq.version, prompt, self.block_tokens)
                    if (twin := (seq.version, seq.digests[-1])) in prefilling:
                        continue
                    prefilling.add(twin)
                if not self._start(plan, seq):
                    return
            self._set_running(seq)
            budget -= self._plan_running(plan, seq, budget)

    def _set_running(self, seq: Sequence) -> None:
        seq.slot = self.free_slots.pop()
        seq.table_dirty = seq.slot_dirty = True
        self._put(seq, Status.RUNNING)

    def _start(self, plan: Plan, seq: Sequence) -> bool:
        """Blocks for everything a waiting sequence has to prefill, sharing what is known."""
        hits = self._match_prefix(seq)
        for block in hits:
            self.pool.retain(block)
        # One more than the tokens need, because a shared last block is copied on write.
        if not self._make_room(plan, -(-seq.num_tokens // self.block_tokens) - len(hits) + 1):
            self.pool.release(reversed(hits))
            return False
        seq.blocks = hits
        # The last known token is always computed again: its logits are wanted.
        hit_tokens = min(len(hits) * self.block_tokens, seq.num_prompt)
        seq.num_computed = min(hit_tokens, seq.num_tokens - 1, seq.num_prompt + seq.num_scored - 1)
        seq.num_registered = len(hits)
        self.num_prefix_tokens += seq.num_computed
        return True

    def _match_prefix(self, seq: Sequence) -> list[int]:
        hits: list[int] = []
        for key in seq.digests:
            if (block := self.pool.find(key)) is None:
                break
            hits.append(block)
        return hits

    def register_prompt(self, seq: Sequence) -> None:
        """After a step: prompt blocks that are now complete can be shared."""
        while seq.num_registered < len(seq.digests):
            index = seq.num_registered
            if seq.num_computed < min((index + 1) * self.block_tokens, seq.num_prompt):
                return
            self.pool.register(seq.blocks[index], seq.version, seq.digests[index])
            seq.num_registered += 1

    # ------------------------------------------------------------------ blocks

    def _grow(self, plan: Plan, seq: Sequence, end: int) -> bool:
        """Own, unshared blocks under positions [num_computed, end); False if it was pre-empted."""
        for index in range(seq.num_computed // self.block_tokens, -(-end // self.block_tokens)):
            shared = seq.blocks[index : index + 1]  # empty behind the last block
            if shared and self.pool.refs[shared[0]] == 1:
                continue
            if (block := self._take(plan, seq)) is None:
                return False
            if shared:
                plan.cache_ops.append(Copy(shared[0], block))
                self.pool.release(shared)
            seq.blocks[index : index + 1] = [block]
            seq.table_dirty = True
        return True

    def _growth(self, seq: Sequence, budget: int) -> int:
        """Blocks that `_grow` would take for the next rows of a sequence."""
        end = seq.num_computed + min(seq.num_tokens - seq.num_computed, max(1, budget))
        blocks = seq.blocks[seq.num_computed // self.block_tokens :]
        shared = sum(self.pool.refs[block] != 1 for block in blocks)
        return shared + max(0, -(-end // self.block_tokens) - len(seq.blocks))

    def _make_room(self, plan: Plan, num_needed: int) -> bool:
        """Spill idle sessions, longest idle first, until the blocks are there."""
        while self.pool.num_available < num_needed:
            if (victim := next((seq for seq in self.idle.values() if seq.blocks), None)) is None:
                return False
            self.spill(plan, victim)
        return True

    def _take(self, plan: Plan, seq: Sequence) -> int | None:
        """A block, spilling idle sessions, then the youngest; None when that was seq itself."""
        while (block := self.pool.take()) is None:
            if not self._make_room(plan, 1):
                victim = next(reversed(self.running.values()))
                self.num_preemptions += 1
                self.spill(plan, victim)
                if victim is seq:
                    return None
        return block

    def _restore(self, plan: Plan, seq: Sequence) -> bool:
        """Take back a spilled sequence, with room for its next token; without the blocks of rows
        beyond a turn's end, which the host may hold too."""
        if not self._make_room(plan, -(-seq.num_tokens // self.block_tokens) + 1):
            return False
        seq.blocks = self._take_available(-(-seq.num_computed // self.block_tokens))
        plan.cache_ops.append(Restore(seq, tuple(seq.blocks)))
        self.release_host(seq)
        seq.num_registered = len(seq.digests)
        return True
