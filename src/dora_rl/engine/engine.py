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

Where a step runs out of memory, its requests start again from the tokens they have, and later steps
have half as many rows at most: nothing is lost but the computing. `notes` says so, once each time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.engine.backend import Runner, make_runner
from dora_rl.engine.journal import Journal
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan, StepResult
from dora_rl.engine.residency import Residency
from dora_rl.engine.scheduler import Scheduler
from dora_rl.engine.sequence import Output, Request, Status, hits_stop_string, new_sequence
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.engine.stats import EngineStats, stats_of
from dora_rl.engine.transfer import Export, export_request
from dora_rl.model.directory import TensorSource
from dora_rl.model.spec import ModelSpec
from dora_rl.out_of_memory import free_cached, maybe_fail, shortage
from dora_rl.types import Finish, RequestId, SamplingParams, UserError, Version

if TYPE_CHECKING:
    from dora_rl.ports import SealedWeights


class Engine:
    """See the module docstring. `decode` turns token ids into text, for stop strings."""

    def __init__(
        self,
        spec: ModelSpec,
        options: EngineOptions | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        journal: Journal | None = None,
        runner: Runner | None = None,
    ) -> None:
        self.spec, self.options = spec, options or EngineOptions()
        self.decode, self.journal = decode, journal
        self.runner = runner or make_runner(spec, self.options)
        self.context_max = self.options.context_limit(spec.context_max)
        self.scheduler = Scheduler(self.options, self.runner.num_blocks, self.context_max)
        self.residency = Residency(self.runner, self.options.versions_max)
        self.notes: list[str] = []  # for whoever watches
        self._outputs: list[Output] = []
        self._in_flight: deque[tuple[Plan, Any]] = deque()
        self._num_arrived = 0
        self._num_steps = 0
        self._num_decode_tokens = 0
        self._num_prefill_tokens = 0

    # ---------------------------------------------------------------- versions

    def versions(self) -> tuple[Version, ...]:
        return self.residency.versions()

    def load_base(self, source: TensorSource | str | Path, verify: bool = True) -> None:
        """Once, under LoRA (`options.lora_rank`): the weights that all adapters are on."""
        self.residency.load_base(source, verify)

    def load(
        self,
        version: Version,
        source: SealedWeights | TensorSource | str | Path,
        verify: bool = True,
    ) -> None:
        """Load a version at once. `verify` checks a sealed version's checksum and canary."""
        for _ in self.load_layers(version, source, verify):
            pass

    def load_layers(
        self,
        version: Version,
        source: SealedWeights | TensorSource | str | Path,
        verify: bool = True,
    ) -> Iterator[str]:
        """Load layer by layer; call `step` between the items and other versions go on decoding."""
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

    def submit(self, request: Request) -> None:
        """Queue a request; a hopeless one ends at once, as a refused output of the next step."""
        seq = new_sequence(request, self.next_arrival(), self.spec.eos_ids)
        reason = self.refusal(seq)
        if reason:
            self._refuse(seq, reason)
            return
        self.scheduler.add(seq)
        if self.journal:
            self.journal.state(seq)
        finish = self._finish_of(seq)
        if finish is not None:
            self._end(seq, finish, (), ())

    def abort(self, request: RequestId) -> bool:
        """Drop a request (or close a session) without an output; True if it was here."""
        self.drain()
        here = self.scheduler.find(request) is not None
        if here:
            self.forget(request)
        return here

    def extend(
        self, request: RequestId, token_ids: Sequence[int], params: SamplingParams | None = None
    ) -> None:
        """Next turn of a kept session: append given tokens, then sample on.

        Only the new tokens are prefilled. They enter the response with loss mask 0.
        """
        seq = self._known(request, Status.IDLE)
        seq.begin_turn(token_ids, params, self.spec.eos_ids)
        reason = self.refusal(seq, queued=True)
        if reason:
            self.forget(request)
            self._refuse(seq, reason)
            return
        self.scheduler.requeue(seq)
        if self.journal:
            self.journal.state(seq)

    def park(self, request: RequestId) -> None:
        """Put a request aside with its KV on the host (recomputed later if the host is full)."""
        self._set_aside(self._known(request), spill=True)

    def unpark(self, request: RequestId) -> None:
        seq = self._known(request, Status.PARKED)
        if seq.version not in self.residency.slots:
            raise UserError(f"request {tuple(request)}: version {seq.version} is not resident")
        self._go_on(seq)

    def put_aside(self, request: RequestId) -> Seq:
        """Stop decoding a request and hold its KV where it is, for `transfer`."""
        seq = self._known(request)
        self._set_aside(seq, spill=False)
        return seq

    def reversion(self, request: RequestId, version: Version) -> None:
        """Continue on other weights (the `partial` baseline only): re-prefilled, and recorded."""
        seq = self._known(request)
        if version not in self.versions():
            raise UserError(f"request {tuple(request)}: version {version} is not resident")
        parked, idle = seq.status is Status.PARKED, seq.status is Status.IDLE
        self.scheduler.reset(seq)
        self.runner.cache.drop_host(request)
        seq.change_version(version)
        if parked:
            self._set_aside(seq, spill=False)
        elif idle:
            self._go_on(seq)
        if self.journal:
            self.journal.state(seq)

    def adopt(self, seq: Seq) -> None:
        """A request that arrived with its KV (see `transfer`) joins the queue."""
        self._go_on(seq)
        if self.journal:
            self.journal.state(seq)

    def _go_on(self, seq: Seq) -> None:
        """Queue it to decode; a session whose turn had ended is idle again, and says so again."""
        finish = self._finish_of(seq) if seq.request.keep else None
        if finish is None:
            self.scheduler.requeue(seq)
        else:
            self._end(seq, finish, (), ())

    def forget(self, request: RequestId) -> None:
        """Drop every trace of a request."""
        seq = self.scheduler.find(request)
        assert seq is not None
        self.scheduler.remove(seq)
        self.runner.cache.drop_host(request)
        if self.journal:
            self.journal.end(request)

    def refusal(self, seq: Seq, queued: bool = False) -> str:
        """Why a sequence can never run here, or an empty string."""
        ids, vocab = seq.tokens, self.spec.vocab
        if not queued and self.scheduler.find(seq.id) is not None:
            return f"request {tuple(seq.id)} is already in this engine"
        if seq.version not in self.residency.slots:
            return f"version {seq.version} is not resident (resident: {list(self.versions())})"
        if not seq.num_prompt:
            return "the prompt is empty"
        if min(ids) < 0 or max(ids) >= vocab:
            bad = next(token for token in ids if not 0 <= token < vocab)
            return f"token id {bad} is outside the vocabulary of {vocab}"
        length = seq.num_prompt + max(seq.response_max, seq.num_response)
        if length > self.context_max:
            return f"{length} tokens (prompt + tokens_max) exceed the context of {self.context_max}"
        if -(-length // self.options.block_tokens) + 1 > self.runner.num_blocks:
            return f"{length} tokens can never fit in {self.runner.num_blocks} KV blocks"
        return ""

    @property
    def length_max(self) -> int:
        """Tokens that a request can ever have here, prompt included."""
        return min(self.context_max, (self.runner.num_blocks - 1) * self.options.block_tokens)

    def find(self, request: RequestId) -> Seq | None:
        """A request that is here; without `drain` before, its end may be in flight."""
        return self.scheduler.find(request)

    def export(self, request: RequestId) -> Export:
        """The sending half of a migration (see `transfer`)."""
        return export_request(self, request)

    def is_parked(self, request: RequestId) -> bool:
        return request in self.scheduler.parked

    def warm_up(self, plain: bool = True) -> Iterator[None]:
        """Whatever the device does better before there is work, a part at a time; `plain`: most
        requests will draw from the whole distribution (`sequence.is_plain`)."""
        return self.runner.warm_up(plain)

    def next_arrival(self) -> int:
        self._num_arrived += 1
        return self._num_arrived

    def has_work(self) -> bool:
        s = self.scheduler
        return bool(self._outputs or self._in_flight or s.running or s.waiting or s.spilled)

    # -------------------------------------------------------------------- step

    def step(self) -> list[Output]:
        """Plan, run, commit. Returns what every request gained."""
        plan = self.scheduler.plan(self.runner.burst)
        if (plan.spans or plan.cache_ops) and (missing := self._launch(plan)):
            self._start_again(plan, missing)
            plan = Plan()
        depth = self.runner.depth if plan.spans else 0
        while len(self._in_flight) > depth:
            self._collect()
        self._num_steps += plan.repeat
        outputs, self._outputs = self._outputs, []
        if self.journal:
            idle = not self.has_work()
            self.journal.step(self.scheduler.sequences(), plan.repeat, idle=idle)
        return outputs

    def _launch(self, plan: Plan) -> str:
        """Returns what was missing where memory ran out, outside of the handler, whose traceback
        holds the step's tensors."""
        try:
            maybe_fail("launch")
            launched = self.runner.launch(plan, self.residency.slots)
        except RuntimeError as error:
            missing = shortage(error)
            if not missing:
                raise
        else:
            self._in_flight.append((plan, launched))
            return ""
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
        """Wait for what is in flight; its outputs come with the next step."""
        while self._in_flight:
            self._collect()

    def _collect(self) -> None:
        plan, launched = self._in_flight.popleft()
        for result in self.runner.collect(launched):
            if result.span.seq.status is Status.ENDED or result.span.seq.finish is not None:
                continue
            if plan.repeat > 1:
                self._commit_burst(result)
            else:
                self._commit(result)
        for span in plan.spans:
            if span.num_rows > 1:
                self._num_prefill_tokens += span.num_rows
            seq = span.seq
            if seq.num_registered < len(seq.digests) and seq.status is Status.RUNNING:
                self.scheduler.register_prompt(seq)

    def _commit_burst(self, result: StepResult) -> None:
        """As many of the tokens as the response has room for; the rest is surplus."""
        span, token_ids, logprobs = result[:3]
        seq = span.seq
        if seq.request.params.stop_strings:
            for row in zip(token_ids, logprobs, strict=True):
                if seq.finish is None:
                    self._commit(StepResult(span, [row[0]], [row[1]], [], []))
            return
        count = min(len(token_ids), seq.response_max - len(seq.logprobs))
        if seq.stop_ids:
            stops = (i + 1 for i in range(count) if token_ids[i] in seq.stop_ids)
            count = next(stops, count)
        self._commit(StepResult(span, token_ids[:count], logprobs[:count], [], []), count)

    def _commit(self, result: StepResult, num_drawn: int = 1) -> None:
        """Of the tokens, the last `num_drawn` are new, where the span draws; others were scored."""
        span, token_ids, logprobs, raw_logprobs, top = result
        seq = span.seq
        if any(map(math.isnan, logprobs)):
            seq.error = f"request {tuple(seq.id)}: non-finite logits"
            self.scheduler.pool.poison(seq.blocks)
            self._end(seq, Finish.ERROR, (), ())
            return
        seq.logprobs += logprobs
        if raw_logprobs:
            seq.raw_logprobs += raw_logprobs
        seq.loss_mask += [1] * len(token_ids)
        self._num_decode_tokens += len(token_ids)
        if span.sample:
            seq.tokens += token_ids[-num_drawn:]
        if self.journal:
            self.journal.tokens(seq.id, token_ids, logprobs, raw_logprobs)
        finish = self._finish_of(seq, span.sample)
        if finish is not None:
            self._end(seq, finish, tuple(token_ids), tuple(logprobs), tuple(top))
        else:
            key = seq.request.id
            self._outputs.append(Output(key, tuple(token_ids), tuple(logprobs), None, tuple(top)))

    def _finish_of(self, seq: Seq, sampled: bool = True) -> Finish | None:
        """Whether the response is complete with its newest token."""
        if not seq.turns:
            return Finish.STOP  # a session that others open: see `Request.turns`
        num_known = len(seq.logprobs)
        if not num_known:
            return None
        if seq.stop_ids or seq.request.params.stop_strings:
            drawn = sampled and num_known == seq.num_response and seq.loss_mask[-1]
            if drawn and (seq.tokens[-1] in seq.stop_ids or hits_stop_string(seq, self.decode)):
                return Finish.STOP
        return Finish.LENGTH if num_known >= seq.response_max else None

    def _end(
        self,
        seq: Seq,
        finish: Finish,
        tokens: tuple[int, ...],
        logprobs: tuple[float, ...],
        top: tuple = (),
    ) -> None:
        seq.finish = finish
        if seq.request.keep and finish in (Finish.STOP, Finish.LENGTH):
            seq.num_tokens = len(seq.tokens)
            seq.num_computed = min(seq.num_computed, seq.num_tokens - 1)
            self.scheduler.keep_idle(seq)
        else:
            self.forget(seq.id)
        self._outputs.append(Output(seq.id, tokens, logprobs, seq.trajectory(), top))

    def _refuse(self, seq: Seq, reason: str) -> None:
        seq.finish, seq.error = Finish.REFUSED, reason
        self._outputs.append(Output(seq.id, (), (), seq.trajectory()))

    def _known(self, request: RequestId, status: Status | None = None) -> Seq:
        self.drain()
        seq = self.scheduler.find(request)
        if seq is None or (status is not None and seq.status is not status):
            state = "not here" if seq is None else seq.status.name.lower()
            wanted = "" if status is None else f", not {status.name.lower()}"
            raise UserError(f"request {tuple(request)} is {state}{wanted}")
        return seq

    def _set_aside(self, seq: Seq, spill: bool) -> None:
        plan = Plan()
        self.scheduler.put_aside(plan, seq, spill)
        self.runner.perform(plan)

    def stats(self) -> EngineStats:
        return stats_of(
            self.scheduler,
            steps=self._num_steps,
            decode_tokens=self._num_decode_tokens,
            prefill_tokens=self._num_prefill_tokens,
            exact=self.runner.exact,
        )
