"""A runner that guesses by itself, as a GPU does, on the CPU: for tests of what the engine makes of
it. Where its requests are it alone knows, until a burst is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dora_rl.engine.guessing import GUESSES_MAX, Guessing
from dora_rl.engine.plan import Plan, Span, StepResult, most_of
from dora_rl.engine.runner import Runner
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.engine.texts import Texts
from dora_rl.types import Version
from tests.kit.tiny_models import VOCAB
from tests.unit.engine.ahead_runner import AheadRunner

Truth = Callable[[Seq], Sequence[int]]


class GuessingRunner(AheadRunner):
    """`truth` says what a request will draw, prompt and response: guesses are right for a while."""

    def __init__(self, inner: Runner, burst: int, seed: int, truth: Truth, **given: Any) -> None:
        super().__init__(inner, burst)
        self.guessing = Guessing(Texts(64), **given)
        self._random, self._truth = random.Random(seed), truth
        self._at: dict[Seq, int] = {}  # where the device is
        self._said: dict[Seq, list[int]] = {}  # and what it has drawn that nobody has read
        self.num_guessed = 0
        self.rows_most = 0

    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> list[StepResult]:
        if not plan.guess_rows:
            return super().launch(plan, slots)
        self.num_guessed += 1
        self.inner.cache.perform(plan)
        found = {span.seq: StepResult(span, [], [], [], []) for span in plan.spans}
        for seq in found:
            if not self._said.get(seq):
                self._at[seq] = len(seq.tokens) - 1
        tried = [0.0] * 9
        for _ in range(plan.repeat):
            left = plan.guess_rows - len(plan.spans)
            for span in plan.spans:
                left -= self._step(span.seq, found, left, slots)
        made = sum(len(r.token_ids) for r in found.values()) / (plan.repeat * len(found))
        self.guessing.learn(tried, tried)
        most = most_of(found, together=False)
        self.guessing.make(*most, plan.guess_rows, made)
        return list(found.values())

    def collect(self, launched: list[StepResult]) -> list[StepResult]:
        for result in launched:
            said = self._said.get(result.span.seq, [])
            del said[: len(result.token_ids)]
        return launched

    def _step(
        self, seq: Seq, found: dict[Seq, StepResult], left: int, slots: Mapping[Version, int]
    ) -> int:
        """One step of a request. Returns how many guesses it had."""
        room = len(seq.blocks) * self.inner.options.block_tokens
        end = min(room, seq.num_prompt + seq.response_max - 1)
        at = self._at[seq]
        if at >= end:
            return 0
        said = self._said.setdefault(seq, [])
        draw, right = self._random, tuple(self._truth(seq)[at + 1 :])
        some = tuple(draw.randrange(VOCAB) for _ in range(GUESSES_MAX))
        guesses = draw.choice((right, right[: draw.randint(0, 3)] + some, some, ()))
        guesses = guesses[: max(0, min(GUESSES_MAX, left, end - at - 1))]
        length = len(seq.tokens)
        seq.tokens += said
        assert len(seq.tokens) == at + 1, "the device goes on behind what it said"
        rows = 1 + len(guesses)
        self.rows_most = max(self.rows_most, rows)
        span = Span(seq, at, rows, at, rows, True, guesses)
        (result,) = self.inner.collect(self.inner.launch(Plan(spans=[span]), slots))
        del seq.tokens[length:]
        pairs = zip(guesses, result.token_ids, strict=False)
        count = 1 + next((i for i, (a, b) in enumerate(pairs) if a != b), len(guesses))
        self._at[seq] = at + count
        said += result.token_ids[:count]
        before = found[seq]
        before.token_ids.extend(result.token_ids[:count])
        before.logprobs.extend(result.logprobs[:count])
        drafted, good = before.guessed
        found[seq] = before._replace(guessed=(drafted + len(guesses), good + count - 1))
        return len(guesses)
