"""Which requests get drafts, and how long: what is measured to pay, and no more.

A draft row pays where its chance of being right exceeds what it costs, in tokens that the engine
would make in the same time. The chance is measured per request, and per group for those that begin:
exponential averages over the guesses that were checked. The cost is measured too: a line through
the times of recent steps over their rows, at the upper end of its error. Few requests on a device
that reads all weights in each step: rows cost little and drafts are long. A batch that fills the
device: none.

Where drafts do not pay, nothing is drafted. Then now and then a guess is only compared with what
comes anyway, and rarely a few steps with some drafts find out what rows cost now.

Decides by the clock, so two runs may draft differently. What they generate is the same: a draft
counts only where it is what the request draws (see `Engine`).

    speculation.open(seq), close(request)        a request is here, or no longer
    speculation.add_drafts(plan, scheduler)      before a step
    speculation.learn(span, right, used)         of each span with drafts
    speculation.timed(plan, seconds)             behind it
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dora_rl.engine.drafts import Drafts
from dora_rl.engine.plan import Plan, Span
from dora_rl.engine.scheduler import Scheduler
from dora_rl.engine.sequence import Sequence
from dora_rl.types import RequestId, Version

FIXED_TOKENS = 4  # of each draft, where all requests are to have one
DRAFT_MAX = 12
CHANCE_AT_FIRST = 0.5  # of a guess to be right, where none was checked yet
CHANCE_MIN, CHANCE_MAX = 0.1, 0.98  # below: not even cheap rows are tried; above: nobody is so sure
REQUEST_RATE, GROUP_RATE = 1 / 8, 1 / 32  # of exponential averages
OLDEST_WORTH = 1.25  # of a token of the oldest of several versions: its deadline is the nearest
LOOK_STEPS = 16  # between two guesses that are only compared
TRIAL_STEPS = 4
TRIAL_ROWS, TRIAL_SHARE = 4, 4  # drafts of a step of a trial: so many, or a share of the requests
PAUSE_MIN, PAUSE_MAX = 64, 2048  # steps between two trials
PLAIN_EVERY = 32  # drafted steps; then one without: what rows cost is a difference
STEPS_KNOWN = 8  # before a line is drawn
FORGET = 1 / 64  # of what older steps weigh, by each new one


class StepTime:
    """Seconds of a step as `fixed + rows * each`: least squares over recent steps."""

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # of 1, x, y, xx, xy, yy
        self._count = 0
        self.fixed = self.each = self.error = 0.0

    def add(self, rows: int, seconds: float) -> None:
        self._count += 1
        if self.is_known:  # a machine that others use too now and then stands still
            seconds = min(seconds, 2 * (self.fixed + self.each * rows))
        x, y = float(rows), seconds
        new = (1.0, x, y, x * x, x * y, y * y)
        self._sums = [old * (1 - FORGET) + more for old, more in zip(self._sums, new, strict=True)]
        self._fit()

    @property
    def is_known(self) -> bool:
        return self._count >= STEPS_KNOWN and self.each + self.error < math.inf

    def _fit(self) -> None:
        n, x, y, xx, xy, yy = self._sums
        spread = xx - x * x / n
        if spread < 0.5 or n < 3:  # rows hardly differed
            self.fixed, self.each, self.error = 0.0, y / x, math.inf
            return
        self.each = max((xy - x * y / n) / spread, 0.01 * y / x)
        self.fixed = max(0.0, (y - self.each * x) / n)
        left = yy - y * y / n - (xy - x * y / n) ** 2 / spread
        self.error = math.sqrt(max(0.0, left) / (n - 2) / spread)


@dataclass(slots=True)
class _Guesses:
    """Of a running request."""

    chance: float
    next_look: int = 0  # step
    place: int = -1  # of a guess that is only compared
    token: int = -1


@dataclass(slots=True)
class _Group:
    chance: float
    num_live: int = 0


class Speculation:
    """`fixed`: every request has drafts of `FIXED_TOKENS`, whatever they cost."""

    def __init__(
        self,
        *,
        fixed: bool = False,
        drafts: Drafts | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.fixed, self.clock = fixed, clock
        self.drafts = drafts or Drafts()
        self.time = StepTime()
        self.drafted: Counter[Version] = Counter()
        self.accepted: Counter[Version] = Counter()
        self._guesses: dict[RequestId, _Guesses] = {}
        self._groups: dict[int, _Group] = {}
        self._chance = CHANCE_AT_FIRST
        self._num_steps = 0
        self._pause, self._trial_at, self._trial_left = PAUSE_MIN, STEPS_KNOWN, 0
        self._num_drafted = 0  # steps since one without
        self._gain = 1.0  # expected of the last step with drafts, in tokens per time

    # --------------------------------------------------------------- requests

    def open(self, seq: Sequence) -> None:
        self.close(seq.id)
        self.drafts.open(seq.id, seq.request.prompt_ids, seq.tokens)
        group = self._groups.setdefault(seq.id.group, _Group(self._chance))
        group.num_live += 1
        self._guesses[seq.id] = _Guesses(group.chance)

    def close(self, request: RequestId) -> None:
        self.drafts.close(request)
        if self._guesses.pop(request, None) is None:
            return
        group = self._groups[request.group]
        group.num_live -= 1
        if not group.num_live:
            del self._groups[request.group]

    def clear(self) -> None:
        """After an error: whatever it was, it is not kept."""
        self.drafts.clear()
        self._guesses.clear()
        self._groups.clear()

    def counts(self) -> dict[Version, tuple[int, int]]:
        """Drafted and accepted tokens of each version."""
        return {version: (n, self.accepted[version]) for version, n in self.drafted.items()}

    # ------------------------------------------------------------------ steps

    def add_drafts(self, plan: Plan, scheduler: Scheduler) -> None:
        self._num_steps += 1
        spans = [
            (index, span)
            for index, span in enumerate(plan.spans)
            if span.num_rows == 1 and span.sample and len(span.seq.tokens) == span.start + 1
        ]
        if not spans:
            return
        room = scheduler.step_tokens_max - plan.num_rows
        if self.fixed:
            for index, span in spans:
                drafts = self.propose(span.seq, min(FIXED_TOKENS, room))
                room -= scheduler.add_drafts(plan, index, drafts)
            return
        self._compare(spans)
        if self._trial_left or self._begins_trial(spans):
            self._try(plan, scheduler, spans, room)
        elif self.time.is_known and self._num_drafted < PLAIN_EVERY:
            self._draft(plan, scheduler, spans, room)

    def propose(self, seq: Sequence, length: int) -> tuple[int, ...]:
        """Up to so many guesses of what a request draws next."""
        return self.drafts.draft(seq.id, length) if length > 0 else ()

    def learn(self, span: Span, right: int, used: int) -> None:
        """Of a span's drafts the first `right` are what was drawn, `used` of them became tokens."""
        version = span.seq.version
        self.drafted[version] += len(span.drafts)
        self.accepted[version] += used
        for _ in range(right):
            self._check(span.seq.id, True)
        if right < len(span.drafts):
            self._check(span.seq.id, False)

    def timed(self, plan: Plan, seconds: float) -> None:
        """A step took so long. Only those that do nothing but decode are compared."""
        if self.fixed or not plan.spans or plan.cache_ops:
            return
        if any(span.num_rows > 1 and not span.drafts for span in plan.spans):
            return
        self.time.add(plan.num_rows, seconds)
        drafted = plan.num_rows > len(plan.spans)
        self._num_drafted = self._num_drafted + 1 if drafted else 0

    # ----------------------------------------------------------------- inside

    def _check(self, request: RequestId, right: bool) -> None:
        if (guesses := self._guesses.get(request)) is None:
            return
        group = self._groups[request.group]
        guesses.chance += (right - guesses.chance) * REQUEST_RATE
        group.chance += (right - group.chance) * GROUP_RATE
        self._chance += (right - self._chance) * GROUP_RATE

    def _compare(self, spans: list[tuple[int, Span]]) -> None:
        """Guesses that cost no row: was the last one right, and what is the next one?"""
        for _, span in spans:
            seq = span.seq
            guesses = self._guesses.get(seq.id)
            if guesses is None or self._num_steps < guesses.next_look:
                continue
            if 0 <= guesses.place < len(seq.tokens):
                self._check(seq.id, seq.tokens[guesses.place] == guesses.token)
                guesses.place, guesses.next_look = -1, self._num_steps + LOOK_STEPS
            elif found := self.propose(seq, 1):
                guesses.place, guesses.token = len(seq.tokens), found[0]
            else:
                guesses.next_look = self._num_steps + LOOK_STEPS

    def _begins_trial(self, spans: list[tuple[int, Span]]) -> bool:
        if self._num_steps < self._trial_at or not any(map(self._is_likely, spans)):
            return False
        self._trial_left = TRIAL_STEPS
        self._trial_at = self._num_steps + self._pause
        self._pause = min(2 * self._pause, PAUSE_MAX)
        return True

    def _is_likely(self, place: tuple[int, Span]) -> bool:
        guesses = self._guesses.get(place[1].seq.id)
        return guesses is not None and guesses.chance > CHANCE_MIN

    def _try(
        self, plan: Plan, scheduler: Scheduler, spans: list[tuple[int, Span]], room: int
    ) -> None:
        self._trial_left -= 1
        left = min(room, max(TRIAL_ROWS, len(spans) // TRIAL_SHARE))
        for index, span in spans:
            if left <= 0:
                return
            drafts = self.propose(span.seq, min(left, FIXED_TOKENS))
            left -= scheduler.add_drafts(plan, index, drafts)

    def _draft(
        self, plan: Plan, scheduler: Scheduler, spans: list[tuple[int, Span]], room: int
    ) -> None:
        """Each request as many tokens as are worth their rows, at the rate the last drafts gave."""
        each, count = self.time.each + self.time.error, len(spans)
        plain_s = self.time.fixed + self.time.each * count
        price = each * count / plain_s * self._gain  # of a row, in tokens
        versions = {span.seq.version for _, span in spans}
        oldest = min(versions) if len(versions) > 1 else None
        more, num_rows = 0.0, 0
        for index, span in spans:
            guesses = self._guesses.get(span.seq.id)
            if guesses is None:
                continue
            worth = OLDEST_WORTH if span.seq.version == oldest else 1.0
            length = min(_length(guesses.chance, price / worth), room)
            if length and (found := self.propose(span.seq, length)):
                rows = scheduler.add_drafts(plan, index, found)
                room -= rows
                num_rows += rows
                more += sum(guesses.chance**i for i in range(1, rows + 1))
        took_s = plain_s + self.time.each * num_rows
        self._gain = max(1.0, (count + more) / count * plain_s / took_s)
        if num_rows:
            self._pause, self._trial_at = PAUSE_MIN, self._num_steps + PAUSE_MIN


def _length(chance: float, price: float) -> int:
    """Guesses whose chance, all before them being right too, is above the price of a row."""
    chance = min(chance, CHANCE_MAX)
    if chance <= max(price, CHANCE_MIN):
        return 0
    return min(DRAFT_MAX, int(math.log(price) / math.log(chance)))
