"""The native engine: plan, run, commit; several policy versions, one device.

Single-threaded and synchronous: nothing happens outside a call. A request names its version; it is
planned only under that version and nothing else can decode it. Invariants, after every call: blocks
are conserved, and every submitted request is in exactly one queue or has ended exactly once.

    engine = Engine(read_spec(path), EngineOptions())
    engine.load(0, HfDirectory(path))
    engine.submit(Request(RequestId(0, 0), 0, prompt_ids, SamplingParams()))
    while engine.has_work():
        for output in engine.step():
            ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dora_rl.engine.cache import context_limit
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.result import StepResult
from dora_rl.engine.runner import CpuRunner
from dora_rl.engine.scheduler import Scheduler
from dora_rl.engine.sequence import Output, Request, Status, new_sequence
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.engine.spec import ModelSpec
from dora_rl.engine.weights import TensorSource
from dora_rl.types import Finish, RequestId, UserError, Version


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges; `free + used + cached == total` blocks."""

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


class Engine:
    """See the module docstring. `decode` turns token ids into text, for stop strings."""

    def __init__(
        self,
        spec: ModelSpec,
        options: EngineOptions | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.spec, self.options = spec, options or EngineOptions()
        self.decode = decode
        self.runner = CpuRunner(spec, self.options)
        self.scheduler = Scheduler(self.options, self.runner.num_blocks)
        self.context_max = context_limit(spec, self.options)
        self._slots: dict[Version, int] = {}
        self._outputs: list[Output] = []
        self._num_arrived = 0
        self._num_steps = 0
        self._num_decode_tokens = 0
        self._num_prefill_tokens = 0

    # ---------------------------------------------------------------- versions

    def versions(self) -> tuple[Version, ...]:
        return tuple(sorted(self._slots))

    def load(self, version: Version, source: TensorSource, where: str = "weights") -> None:
        for _ in self.runner.load(self._free_slot(version), source, where):
            pass
        self._slots[version] = self._free_slot(version)

    def _free_slot(self, version: Version) -> int:
        if version in self._slots:
            raise UserError(f"version {version} is already resident")
        for slot in range(self.options.versions_max):
            if slot not in self._slots.values():
                return slot
        raise UserError(f"version {version}: all {self.options.versions_max} slots are taken")

    # ---------------------------------------------------------------- requests

    def submit(self, request: Request) -> None:
        """Queue a request; a hopeless one ends at once, as a refused output of the next step."""
        seq = new_sequence(request, self._num_arrived, self.spec.eos_ids)
        self._num_arrived += 1
        reason = self._refusal(seq)
        if reason:
            seq.finish, seq.error = Finish.REFUSED, reason
            self._outputs.append(Output(seq.id, (), (), seq.trajectory()))
            return
        self.scheduler.add(seq)

    def _refusal(self, seq: Seq) -> str:
        ids = seq.tokens
        if self.scheduler.find(seq.id) is not None:
            return f"request {tuple(seq.id)} is already in this engine"
        if seq.version not in self._slots:
            return f"version {seq.version} is not resident (resident: {list(self.versions())})"
        if not seq.num_prompt:
            return "the prompt is empty"
        if min(ids) < 0 or max(ids) >= self.spec.vocab:
            bad = next(i for i in ids if not 0 <= i < self.spec.vocab)
            return f"token id {bad} is outside the vocabulary of {self.spec.vocab}"
        length = seq.num_prompt + seq.response_max
        if length > self.context_max:
            return f"{length} tokens (prompt + tokens_max) exceed the context of {self.context_max}"
        if -(-length // self.options.block_tokens) + 1 > self.runner.num_blocks:
            return f"{length} tokens can never fit in {self.runner.num_blocks} KV blocks"
        return ""

    def abort(self, request: RequestId) -> bool:
        """Drop a request without an output; True if it was here."""
        seq = self.scheduler.find(request)
        if seq is None:
            return False
        self._forget(seq)
        return True

    def has_work(self) -> bool:
        s = self.scheduler
        return bool(self._outputs or s.running or s.waiting or s.spilled)

    # -------------------------------------------------------------------- step

    def step(self) -> list[Output]:
        """Plan, run, commit. Returns what every request gained."""
        plan = self.scheduler.plan()
        for result in self.runner.run(plan, self._slots):
            self._commit(result)
        for span in plan.spans:
            if span.num_rows > 1:
                self._num_prefill_tokens += span.num_rows
            if span.seq.status is Status.RUNNING:
                self.scheduler.register_prompt(span.seq)
        self._num_steps += 1
        outputs, self._outputs = self._outputs, []
        return outputs

    def _commit(self, result: StepResult) -> None:
        span = result.span
        seq = span.seq
        if any(math.isnan(value) for value in result.logprobs):
            self._end(seq, Finish.ERROR, result, f"request {tuple(seq.id)}: non-finite logits")
            return
        seq.logprobs.extend(result.logprobs)
        seq.raw_logprobs.extend(result.raw_logprobs)
        seq.loss_mask.extend([1] * len(result.token_ids))
        self._num_decode_tokens += len(result.token_ids)
        finish = None
        if span.sample:
            seq.tokens.append(result.token_ids[-1])
            if seq.tokens[-1] in seq.stop_ids or self._hits_stop_string(seq):
                finish = Finish.STOP
        if finish is None and len(seq.logprobs) >= seq.response_max:
            finish = Finish.LENGTH
        if finish is not None:
            self._end(seq, finish, result)
        else:
            self._outputs.append(_output(result))

    def _end(self, seq: Seq, finish: Finish, result: StepResult, error: str = "") -> None:
        seq.finish, seq.error = finish, error
        if finish is Finish.ERROR:
            self.runner.cache.scrub([b for b in seq.blocks if self.scheduler.pool.refs[b] == 1])
        self._forget(seq)
        self._outputs.append(_output(result, seq))

    def _forget(self, seq: Seq) -> None:
        self.scheduler.remove(seq)
        self.runner.cache.drop_host(seq.id)

    def _hits_stop_string(self, seq: Seq) -> bool:
        strings = seq.request.params.stop_strings
        if not strings or self.decode is None:
            return False
        # A stop string of n characters ends in the newest token and began at most n tokens ago.
        num_tokens = max(len(string) for string in strings) + 1
        tail = self.decode(seq.tokens[max(seq.num_prompt, len(seq.tokens) - num_tokens) :])
        return any(string in tail for string in strings)

    def stats(self) -> EngineStats:
        s = self.scheduler
        counts = s.pool.counts()
        return EngineStats(
            free_blocks=counts.free,
            used_blocks=counts.used,
            cached_blocks=counts.cached,
            total_blocks=counts.total,
            host_blocks=s.num_host_blocks,
            running=len(s.running),
            waiting=len(s.waiting),
            spilled=len(s.spilled),
            parked=len(s.parked),
            idle=len(s.idle),
            kv_tokens=sum(seq.num_computed for seq in s.sequences()),
            steps=self._num_steps,
            decode_tokens=self._num_decode_tokens,
            prefill_tokens=self._num_prefill_tokens,
            prefix_tokens=s.num_prefix_tokens,
            preemptions=s.num_preemptions,
        )


def _output(result: StepResult, seq: Seq | None = None) -> Output:
    return Output(
        result.span.seq.id,
        tuple(result.token_ids),
        tuple(result.logprobs),
        None if seq is None else seq.trajectory(),
        tuple(result.top_logprobs),
    )
