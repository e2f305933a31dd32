"""The native engine: plan, run, commit; several policy versions, one device.

Single-threaded: nothing happens outside a call. A request names its version; it is planned only
under that version and nothing else can decode it. Invariants, after every call: blocks are
conserved, and every submitted request is in exactly one queue or has ended exactly once.

    engine = Engine(read_spec(path), EngineOptions())
    engine.load(0, path)
    engine.submit(Request(RequestId(0, 0), 0, prompt_ids, SamplingParams()))
    while engine.has_work():
        for output in engine.step():
            ...

On a GPU a step is launched before the tokens of the one before it are read (`async_steps`), so a
token appears one call later, and where the host is slower than the GPU a step is a burst of several
decode steps. A request that stops early then has surplus rows in flight, whose results are dropped.
Every other method first waits for what is in flight.

With `speculation` a decode step may have several rows of a request: its known token and guesses of
the next ones. Every row draws with the number of its own position, and what it draws is a token of
the response where all guesses before it are what was drawn there. So a response is the same with
guesses and without, but for rows that depend on their batch mates (see `exact`). The rows behind a
wrong guess are computed again, and their keys and values overwritten. Such steps are read at once.

Where a step runs out of memory, its requests start again from the tokens they have, and later steps
have half as many rows at most: nothing is lost but the computing. `notes` says so, once each time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dora_rl.engine.guessing import GUESSES_MAX, Guessing
from dora_rl.engine.journal import Journal
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan, StepResult, most_of
from dora_rl.engine.runner import Runner, make_runner
from dora_rl.engine.scheduler import Scheduler
from dora_rl.engine.sequence import (
    Decode,
    EngineStats,
    Limits,
    Output,
    RequestBook,
    Sequence,
    Status,
)
from dora_rl.engine.speculation import Speculation
from dora_rl.engine.tensors.weights import Residency
from dora_rl.engine.transfer import Export, export_request
from dora_rl.model.directory import TensorSource
from dora_rl.model.spec import ModelSpec
from dora_rl.out_of_memory import free_cached, maybe_fail, shortage
from dora_rl.ports import SealedWeights
from dora_rl.types import RequestId, UserError, Version


class Engine(RequestBook):
    """See the module docstring."""

    def __init__(
        self,
        spec: ModelSpec,
        options: EngineOptions | None = None,
        decode: Decode | None = None,
        journal: Journal | None = None,
        runner: Runner | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.spec, self.options = spec, options or EngineOptions()
        self.runner = runner or make_runner(spec, self.options)
        num_blocks, context = self.runner.cache.num_blocks, self.runner.context
        limits = Limits(spec.vocab, context, num_blocks, self.options.block_tokens)
        super().__init__(limits, spec.eos_ids, decode, journal)
        self.scheduler = Scheduler(self.options, num_blocks, context)
        self.residency = Residency(self.runner, self.options.versions_max)
        self.speculation = speculation or make_speculation(self.options, self.runner)
        self.guessing = self.runner.guessing if self.speculation is None else None
        self._in_flight: deque[tuple[Plan, Any]] = deque()

    # ---------------------------------------------------------------- versions

    def versions(self) -> tuple[Version, ...]:
        return self.residency.versions()

    def load_base(self, source: TensorSource | str | Path, verify: bool = True) -> None:
        """Once, under LoRA (`options.lora_rank`): the weights that all adapters are on."""
        self.residency.load_base(source, verify)

    def load_layers(
        self,
        version: Version,
        source: SealedWeights | TensorSource | str | Path,
        verify: bool = True,
    ) -> Iterator[str]:
        return self.residency.load(version, source, verify)

    def retire(self, version: Version) -> None:
        """Free a version's slot; refused while a request runs on it (a parked one needs none)."""
        self.drain()
        users = [
            tuple(seq.id)
            for seq in self.scheduler.sequences()
            if seq.version == version and seq.status is not Status.PARKED
        ]
        if users:
            raise UserError(f"version {version} has {len(users)} requests, the first is {users[0]}")
        self.residency.retire(version)
        self.scheduler.pool.forget_version(version)

    # ---------------------------------------------------------------- requests

    def park(self, request: RequestId) -> None:
        """Put a request aside with its KV on the host (recomputed later if the host is full)."""
        self.put_aside(request, spill=True)

    def put_aside(self, request: RequestId, spill: bool = False) -> Sequence:
        """Stop decoding a request; its KV stays where it is, for `transfer`, or is spilled."""
        seq, plan = self.known(request), Plan()
        self.scheduler.put_aside(plan, seq, spill)
        self.runner.cache.perform(plan)
        return seq

    def reversion(self, request: RequestId, version: Version) -> None:
        """Continue on other weights (the `partial` baseline only): re-prefilled, and recorded."""
        seq = self.known(request)
        self.check_resident(request, version)
        parked, idle = seq.status is Status.PARKED, seq.status is Status.IDLE
        self.scheduler.reset(seq)
        self.runner.cache.drop_host(request)
        seq.change_version(version)
        if parked:
            self.put_aside(request)
        elif idle:
            self.go_on(seq)
        self.note(seq)

    def adopt(self, seq: Sequence) -> None:
        """A request that arrived with its KV (see `transfer`) joins the queue."""
        if self.speculation is not None:
            self.speculation.open(seq)
        self.go_on(seq)
        self.note(seq)

    def find(self, request: RequestId) -> Sequence | None:
        return self.scheduler.find(request)

    def sequences(self) -> Iterator[Sequence]:
        return self.scheduler.sequences()

    def export(self, request: RequestId) -> Export:
        """The sending half of a migration (see `transfer`)."""
        return export_request(self, request)

    def warm_up(self, plain: bool = True) -> Iterator[None]:
        """Whatever the device does better before there is work, a part at a time; `plain`: most
        requests will draw from the whole distribution (`sequence.is_plain`)."""
        return self.runner.warm_up(plain)

    def has_work(self) -> bool:
        s = self.scheduler
        return bool(self.outputs or self._in_flight or s.running or s.waiting or s.spilled)

    def _enter(self, seq: Sequence) -> None:
        if self.speculation is not None:
            self.speculation.open(seq)
        self.scheduler.requeue(seq)

    def _run(self, seq: Sequence) -> None:
        self.scheduler.requeue(seq)

    def _rest(self, seq: Sequence) -> None:
        seq.num_tokens = len(seq.tokens)
        seq.num_computed = min(seq.num_computed, seq.num_tokens - 1)
        if self.guessing is not None:
            self.guessing.texts.settle(seq.id)
        self.scheduler.keep_idle(seq)

    def _leave(self, seq: Sequence) -> None:
        if self.speculation is not None:
            self.speculation.close(seq.id)
        if self.guessing is not None:
            self.guessing.texts.close(seq.id)
        self.scheduler.remove(seq)
        self.runner.cache.drop_host(seq.id)

    def _routing_of(self, seq: Sequence) -> NDArray[Any] | None:
        """As its blocks have it; without any, as it was. Not of the newest token: whether that is
        computed yet depends on who runs beside it."""
        count = min(seq.num_computed, len(seq.tokens) - 1)
        if self.runner.cache.routing is None or not (seq.blocks or seq.num_host_blocks):
            return seq.routing
        return self.runner.cache.read_routing(seq.id, seq.blocks)[:count].numpy()

    def _refusal(self, seq: Sequence, length: int) -> str:
        num_blocks = self.limits.num_blocks
        fits = -(-length // self.options.block_tokens) < num_blocks
        return "" if fits else f"{length} tokens can never fit in {num_blocks} KV blocks"

    # -------------------------------------------------------------------- step

    def step(self) -> list[Output]:
        """Plan, run, commit. Returns what every request gained."""
        speculation = self.speculation
        if self.guessing is not None:
            plan = self._perform(self._plan_guesses(self.guessing))
            self.guessing.end(plan.repeat)
            return self.hand_out(plan.repeat)
        plan = self.scheduler.plan(self.runner.burst if speculation is None else 1)
        if speculation is not None and speculation.is_awake(len(plan.spans)):
            began = speculation.add_drafts(plan, self.scheduler)
            plan = self._perform(plan)
            speculation.end(plan, began)
        else:
            plan = self._perform(plan)
        return self.hand_out(plan.repeat)

    def _plan_guesses(self, guessing: Guessing) -> Plan:
        """A burst with guesses, where that pays and nothing but decoding is to be done; else the
        same as without. Only bursts of one kind follow each other unread."""
        running, texts = self.scheduler.running, guessing.texts
        for seq in [seq for seq in running.values() if seq.id not in texts]:
            texts.open(seq.id, seq.request.prompt_ids, seq.tokens)
        guessing.look(running)
        if not guessing.is_awake and not any(plan.guess_rows for plan, _ in self._in_flight):
            return self.scheduler.plan(self.runner.burst)
        most = most_of(running.values(), together=self.options.lora_rank > 0)
        rows, steps = guessing.way(*most, queued=bool(self.scheduler.waiting))
        if any(bool(plan.guess_rows) != bool(rows) for plan, _ in self._in_flight):
            self.drain()
        plan = None
        if rows and running:
            pending = [plan.repeat for plan, _ in self._in_flight]
            plan = self.scheduler.plan_guesses(steps, GUESSES_MAX + 1, pending)
        if plan is None:
            if any(plan.guess_rows for plan, _ in self._in_flight):
                self.drain()
            return self.scheduler.plan(self.runner.burst)
        plan.guess_rows = rows if plan.spans else 0
        return plan

    def _perform(self, plan: Plan) -> Plan:
        """Returns what was run of it."""
        if (plan.spans or plan.cache_ops) and (missing := self._launch(plan)):
            self._start_again(plan, missing)
            plan = Plan()
        depth = self.runner.depth if plan.spans and self.speculation is None else 0
        while len(self._in_flight) > depth:
            self._collect()
        return plan

    def _launch(self, plan: Plan) -> str:
        """Returns what was missing where memory ran out, outside of the handler, whose traceback
        holds the step's tensors."""
        missing = ""
        try:
            maybe_fail("launch")
            self._in_flight.append((plan, self.runner.launch(plan, self.residency.slots)))
        except RuntimeError as error:
            if not (missing := shortage(error)):
                raise
        return missing

    def _start_again(self, plan: Plan, missing: str) -> None:
        """A plan was booked and did not run: whatever it touched starts from its tokens again."""
        self.scheduler.take_back(plan)
        self.drain()
        for seq in plan.sequences():
            if self.scheduler.find(seq.id) is seq:
                self.scheduler.start_again(seq)
                self.runner.cache.drop_host(seq.id)
        self.notes.append(self.scheduler.shrink(plan, missing))
        free_cached()

    def drain(self) -> None:
        while self._in_flight:
            self._collect()

    def start_over(self) -> None:
        """After `step` has raised: drop what is in flight, every request and whatever the cache
        holds. Versions stay. Whoever has the requests may submit them again."""
        self.runner.settle()
        self._in_flight.clear()
        self.outputs.clear()
        for seq in list(self.scheduler.sequences()):
            self.forget(seq.id)
        if self.speculation is not None:
            self.speculation.clear()
        if self.guessing is not None:
            self.guessing.texts.clear()
        for version in self.versions():
            self.scheduler.pool.forget_version(version)
        # Blocks that the plan was to zero may still hold what is not finite.
        self.scheduler.pool.to_scrub[:] = range(self.scheduler.pool.num_blocks)

    def _collect(self) -> None:
        plan, launched = self._in_flight.popleft()
        for result in self.runner.collect(launched):
            if result.span.seq.status is not Status.ENDED and result.span.seq.finish is None:
                if plan.guess_rows:
                    self._commit_guessed(result)
                elif result.span.drafts:
                    self._commit_drafted(result)
                elif plan.repeat > 1:
                    self._commit_drawn(result)
                else:
                    self._commit(result)
        for span in plan.spans:
            if span.num_rows > 1 and not span.drafts:
                self._num_prefill_tokens += span.num_rows
            seq = span.seq
            if seq.num_registered < len(seq.digests) and seq.status is Status.RUNNING:
                self.scheduler.register_prompt(seq)

    def _commit_drafted(self, result: StepResult) -> None:
        """What was drawn behind guesses that are all right, up to the first one that is not."""
        span, token_ids, logprobs = result[:3]
        seq = span.seq
        if any(map(math.isnan, logprobs)):
            # Of the tokens or of a guess alone? Without guesses the next steps will tell.
            self.scheduler.pool.poison(seq.blocks)
            self.scheduler.start_again(seq)
            if self.speculation is not None:
                self.speculation.close(seq.id)
            return
        pairs = zip(span.drafts, token_ids, strict=False)
        right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(span.drafts))
        before = len(seq.tokens)
        seq.num_computed += right
        seq.num_tokens += right
        seq.num_scored += right
        self._commit_drawn(part_of(result, 0, right + 1))
        if self.speculation is not None:
            self.speculation.learn(span, right, len(seq.tokens) - before - 1)

    def _commit_guessed(self, result: StepResult) -> None:
        """Tokens of a burst in which the device went on behind what it guessed right."""
        span, token_ids = result.span, result.token_ids
        if not token_ids or self.guessing is None:
            return
        seq, count = span.seq, len(token_ids)
        seq.num_computed += count
        seq.num_tokens += count
        seq.num_scored += count
        before = len(seq.tokens)
        self._commit_drawn(result)
        drafted, right = result.guessed
        surplus = count - (len(seq.tokens) - before)
        self.guessing.count(seq.version, drafted, max(0, right - surplus))

    def _commit_drawn(self, result: StepResult) -> None:
        """As many of the tokens as the response has room for; the rest is surplus."""
        span, token_ids = result.span, result.token_ids
        seq = span.seq
        if seq.request.params.stop_strings:
            for index in range(len(token_ids)):
                if seq.finish is None:
                    self._commit(part_of(result, index, index + 1))
            return
        count = min(len(token_ids), seq.response_max - len(seq.logprobs))
        if seq.stop_ids:
            count = next((i + 1 for i in range(count) if token_ids[i] in seq.stop_ids), count)
        self._commit(part_of(result, 0, count), count)

    def _commit(self, result: StepResult, num_drawn: int = 1) -> None:
        """Of the tokens, the last `num_drawn` are new, where the span draws; others were scored."""
        span, token_ids, logprobs, raw_logprobs, top = result[:5]
        seq = span.seq
        if any(map(math.isnan, logprobs)):
            self.scheduler.pool.poison(seq.blocks)
            self.fail(seq, "non-finite logits")
            return
        seq.logprobs += logprobs
        seq.raw_logprobs += raw_logprobs
        seq.loss_mask += [1] * len(token_ids)
        if span.sample:
            seq.tokens += token_ids[-num_drawn:]
        self.gain(seq, token_ids, logprobs, raw_logprobs, top, self.finish_of(seq, span.sample))

    def stats(self) -> EngineStats:
        queues, counts = self.scheduler, self.scheduler.pool.counts()
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
            steps=self.num_steps,
            decode_tokens=self.num_decode_tokens,
            prefill_tokens=self._num_prefill_tokens,
            prefix_tokens=queues.num_prefix_tokens,
            preemptions=queues.num_preemptions,
            exact=self.runner.exact,
            drafts=self._drafts(),
        )

    def _drafts(self) -> dict[Version, tuple[int, int]]:
        source = self.speculation or self.guessing
        return {} if source is None else source.counts()


def part_of(result: StepResult, start: int, end: int) -> StepResult:
    """Of the tokens, those in [start, end)."""
    span, token_ids, logprobs, raw, top = result[:5]
    part = slice(start, end)
    return StepResult(span, token_ids[part], logprobs[part], raw[part], top[part])


def make_speculation(options: EngineOptions, runner: Runner) -> Speculation | None:
    """As `rollout.speculation` says. `auto`: where rows do not depend on their batch mates, so that
    a response is the same bit for bit whatever was drafted by the clock, and no step is launched
    before the last one was read."""
    if options.speculation == "on":
        # A device that runs ahead guesses by itself, or not at all where experts are recorded.
        recorded = runner.depth > 0 and runner.cache.routing is not None
        return None if recorded or runner.guessing is not None else Speculation(fixed=True)
    is_auto = options.speculation == "auto" and runner.exact and not runner.depth
    return Speculation() if is_auto else None
