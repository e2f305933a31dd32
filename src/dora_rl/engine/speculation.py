"""Which requests get drafts, and how long: what is measured to pay, and no more.

A draft row pays where its chance of being right exceeds what it costs, in tokens that the engine
would make in the same time. The chance is measured per request, and per group for those that begin:
exponential averages over the guesses that were checked. The cost is measured too: a line through
the times of recent steps over their rows, at the upper end of its error. Few requests on a device
that reads all weights in each step: rows cost little and drafts are long. A batch that fills the
device: none.

    asleep      nothing is drafted or measured, for some steps or until half of the requests end
    looking     a few steps without drafts are timed, then a few with some
    drafting    as long as the tokens come quicker than they would without

Each look whose guesses bring no gain doubles the sleep behind it. So drafts that cannot pay cost
next to nothing, and a tail of few requests has them soon.

Decides by the time that steps take, so two runs may draft differently. What they generate is the
same: a draft counts only where it is what the request draws (see `Engine`).

    speculation.open(seq), close(request)        a request is here, or no longer
    speculation.is_awake(num_spans)              a step is planned; if so:
    began = speculation.add_drafts(plan, scheduler)
    speculation.learn(span, right, used)         of each span with drafts
    speculation.end(plan, began)                 it is done
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from dora_rl.engine.drafts import Drafts
from dora_rl.engine.plan import Plan, Span
from dora_rl.engine.scheduler import Scheduler, rows_of
from dora_rl.engine.sequence import Sequence
from dora_rl.types import RequestId, Version

FIXED_TOKENS = 4  # of each draft, where all requests are to have one
DRAFT_MAX = 12
CHANCE_AT_FIRST = 0.5  # of a guess to be right, where none was checked yet
CHANCE_MIN, CHANCE_MAX = 0.1, 0.98  # below: not even cheap rows are tried; above: nobody is so sure
REQUEST_RATE, GROUP_RATE = 1 / 8, 1 / 32  # of exponential averages
OLDEST_WORTH = 1.25  # of a token of the oldest of several versions: its deadline is the nearest
LOOK_PLAIN, LOOK_DRAFTED = 6, 6  # steps of a look
LOOK_SHARE = 16  # of the requests, whose drafts are tried
AGAIN_STEPS = 32  # before a request whose guesses were bad is asked again
SLEEP_MIN, SLEEP_MAX = 128, 2048  # steps
CHEAP, SLEEP_CHEAP = 0.5, 256  # a price of rows at which other texts soon may pay; sleep at most
NAP_STEPS = 16  # before fewer requests are a reason to look again
PLAIN_EVERY = 32  # drafted steps; then one without: what rows cost is a difference
GAIN_MIN = 1.02  # how much quicker tokens are expected to come, else it falls asleep again
GAIN_RATE, GAIN_STEPS, GAIN_LEFT = 1 / 64, 32, 1.0  # how much quicker they came, when it is asked
FORGET = 1 / 64  # of what older steps weigh, by each new one


class StepTime:
    """Seconds of a step as `fixed + rows * each`: least squares over recent steps."""

    def __init__(self) -> None:
        self._sums = (0.0,) * 6  # of 1, x, y, xx, xy, yy
        self.fixed = self.each = 0.0
        self.error = math.inf  # of `each`

    def add(self, rows: int, seconds: float) -> None:
        if self.error < self.each:  # a machine that others use too now and then stands still
            seconds = min(seconds, 2 * self.of(rows))
        n, x, y, xx, xy, yy = (one * (1 - FORGET) for one in self._sums)
        n, x, y = n + 1, x + rows, y + seconds
        xx, xy, yy = xx + rows * rows, xy + rows * seconds, yy + seconds * seconds
        self._sums = (n, x, y, xx, xy, yy)
        spread = xx - x * x / n
        if spread < 0.5 or n < 3:  # rows hardly differed
            self.fixed, self.each, self.error = 0.0, y / x, math.inf
            return
        slope = (xy - x * y / n) / spread
        left = yy - y * y / n - slope * slope * spread
        self.error = math.sqrt(max(0.0, left) / (n - 2) / spread)
        self.each = max(slope, 0.01 * y / x)
        self.fixed = max(0.0, (y - self.each * x) / n)

    def of(self, rows: int) -> float:
        return self.fixed + self.each * rows


class State(Enum):
    """See the module docstring."""

    ASLEEP = auto()
    LOOKING = auto()
    DRAFTING = auto()


@dataclass(slots=True)
class _Group:
    chance: float
    num_live: int = 0


@dataclass(slots=True)
class _Guesses:
    """Of a running request: the chance of the next one, and from which step on it is asked for."""

    group: _Group
    chance: float
    next_step: int = 0


class Speculation:
    """`fixed`: every request has drafts of `FIXED_TOKENS`, whatever they cost."""

    def __init__(
        self,
        *,
        fixed: bool = False,
        drafts: Drafts | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.fixed, self._clock = fixed, clock
        self.drafts = drafts or Drafts()
        self.state = State.DRAFTING if fixed else State.ASLEEP
        self.drafted: Counter[Version] = Counter()
        self.accepted: Counter[Version] = Counter()
        self._guesses: dict[RequestId, _Guesses] = {}
        self._groups: dict[int, _Group] = {}
        self._chance = CHANCE_AT_FIRST
        self._time = StepTime()
        self._sleep, self._left, self._nap, self._num_seen = SLEEP_MIN, 0, 0, 0
        self._num_steps = 0  # that were not slept through
        self._num_timed = 0  # in this state
        self._num_looked = 0  # drafts of a look
        self._num_drafted = 0  # steps since one without
        self._used = 0  # guesses of this step that became tokens
        self._made = self._took = 1.0  # tokens and time of a step, in those of one without drafts
        self._expected = 1.0

    # --------------------------------------------------------------- requests

    def open(self, seq: Sequence) -> None:
        self.close(seq.id)
        self.drafts.open(seq.id, seq.request.prompt_ids, seq.tokens)
        group = self._groups.setdefault(seq.id.group, _Group(self._chance))
        group.num_live += 1
        self._guesses[seq.id] = _Guesses(group, group.chance)

    def close(self, request: RequestId) -> None:
        self.drafts.close(request)
        if (guesses := self._guesses.pop(request, None)) is None:
            return
        guesses.group.num_live -= 1
        if not guesses.group.num_live:
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

    def is_awake(self, num_spans: int) -> bool:
        """A step of so many requests is planned."""
        if self.state is State.ASLEEP:
            self._left -= 1
            if self._left > self._nap or (self._left > 0 and 2 * num_spans > self._num_seen):
                return False
            self._enter(State.LOOKING)
            self._num_seen = num_spans
        return True

    def add_drafts(self, plan: Plan, scheduler: Scheduler) -> float:
        """Guesses of what its requests draw next, as rows of the same step. Returns when it began
        to look for them."""
        began = self._clock()
        self._num_steps += 1
        self._used = 0
        spans = [
            (index, span)
            for index, span in enumerate(plan.spans)
            if span.num_rows == 1 and span.sample and len(span.seq.tokens) == span.start + 1
        ]
        room = scheduler.step_tokens_max - rows_of(plan)
        if not spans:
            return began
        if self.fixed:
            for index, span in spans:
                drafts = self.propose(span.seq, min(FIXED_TOKENS, room))
                room -= scheduler.add_drafts(plan, index, drafts)
        elif self.state is State.LOOKING and self._num_timed >= LOOK_PLAIN:
            if _is_timed(plan):
                self._try(plan, scheduler, spans, room)
        elif self.state is State.DRAFTING and self._num_drafted < PLAIN_EVERY:
            self._draft(plan, scheduler, spans, room)
        return began

    def propose(self, seq: Sequence, length: int) -> tuple[int, ...]:
        """Up to so many guesses of what a request draws next."""
        return self.drafts.draft(seq.id, length) if length > 0 else ()

    def learn(self, span: Span, right: int, used: int) -> None:
        """Of a span's drafts the first `right` are what was drawn, `used` of them became tokens."""
        version, wrong = span.seq.version, right < len(span.drafts)
        self.drafted[version] += len(span.drafts)
        self.accepted[version] += used
        self._used += used
        if (guesses := self._guesses.get(span.seq.id)) is None:
            return
        group = guesses.group
        for found in (1.0,) * right + (0.0,) * wrong:
            guesses.chance += (found - guesses.chance) * REQUEST_RATE
            group.chance += (found - group.chance) * GROUP_RATE
            self._chance += (found - self._chance) * GROUP_RATE

    def end(self, plan: Plan, began: float) -> None:
        """A step is done. Only those that do nothing but decode are compared."""
        if self.fixed or not _is_timed(plan):
            return
        seconds, count, num_rows = self._clock() - began, len(plan.spans), rows_of(plan)
        self._time.add(num_rows, seconds)
        self._num_timed += 1
        self._num_drafted = self._num_drafted + 1 if num_rows > count else 0
        if self.state is State.LOOKING:
            if self._num_timed >= LOOK_PLAIN + LOOK_DRAFTED:
                self._enter(State.DRAFTING if self._pays(count) else State.ASLEEP)
        elif self.state is State.DRAFTING:
            self._made += ((count + self._used) / count - self._made) * GAIN_RATE
            self._took += (seconds / self._time.of(count) - self._took) * GAIN_RATE
            if self._num_timed >= GAIN_STEPS and self._made < self._took * GAIN_LEFT:
                self._enter(State.ASLEEP)
            elif self._num_timed >= SLEEP_MIN and self._made > self._took * GAIN_MIN:
                self._sleep = SLEEP_MIN

    # ----------------------------------------------------------------- inside

    def _enter(self, state: State) -> None:
        self.state = state
        self._num_timed = self._num_drafted = 0
        if state is State.ASLEEP:
            if not self._num_looked:  # looking for nothing costs nothing
                self._sleep = SLEEP_MIN
            self._left, self._nap = self._sleep, self._sleep - NAP_STEPS
            is_cheap = self._price(self._num_seen) < CHEAP
            self._sleep = min(2 * self._sleep, SLEEP_CHEAP if is_cheap else SLEEP_MAX)
        elif state is State.LOOKING:
            self._time, self._num_looked = StepTime(), 0
        else:
            self._made, self._took, self._expected = GAIN_MIN, 1.0, 1.0

    def _pays(self, count: int) -> bool:
        """Whether one guess for each request that is worth it brings enough; not where none was
        found."""
        if not self._num_looked:
            return False
        price = self._price(count)
        gains = (max(0.0, one.chance - price) for one in self._guesses.values())
        return sum(gains) / max(1, len(self._guesses)) >= GAIN_MIN - 1

    def _price(self, count: int) -> float:
        """Of a row, in tokens that so many requests make without drafts in that time."""
        took_s = self._time.of(count)
        return (self._time.each + self._time.error) * count / took_s if took_s else math.inf

    def _try(
        self, plan: Plan, scheduler: Scheduler, spans: list[tuple[int, Span]], room: int
    ) -> None:
        """Some drafts of the oldest requests, so that a look costs little."""
        for index, span in spans[: -(-len(spans) // LOOK_SHARE)]:
            drafts = self.propose(span.seq, min(room, FIXED_TOKENS))
            num_rows = scheduler.add_drafts(plan, index, drafts)
            room -= num_rows
            self._num_looked += num_rows > 0

    def _draft(
        self, plan: Plan, scheduler: Scheduler, spans: list[tuple[int, Span]], room: int
    ) -> None:
        """Each request as many tokens as are worth their rows, at the rate of the last drafts."""
        count, now = len(plan.spans), self._num_steps
        price = self._price(count) * self._expected
        versions = {span.seq.version for _, span in spans}
        oldest = min(versions) if len(versions) > 1 else None
        more, num_rows = 0.0, 0
        for index, span in spans:
            guesses = self._guesses.get(span.seq.id)
            if guesses is None or now < guesses.next_step:
                continue
            worth = OLDEST_WORTH if span.seq.version == oldest else 1.0
            length = _length(guesses.chance, price / worth)
            if not length:  # once more with what its group knows by then
                guesses.next_step, guesses.chance = now + AGAIN_STEPS, guesses.group.chance
                continue
            found = self.propose(span.seq, min(length, room - num_rows))
            rows = scheduler.add_drafts(plan, index, found)
            num_rows += rows
            more += sum(guesses.chance**i for i in range(1, rows + 1))
        took_s = self._time.of(count + num_rows)
        self._expected = max(1.0, (1 + more / count) * self._time.of(count) / took_s)


def _is_timed(plan: Plan) -> bool:
    """Whether a step does nothing but decode."""
    return (
        bool(plan.spans)
        and not plan.cache_ops
        and all(span.num_rows == 1 or span.drafts for span in plan.spans)
    )


def _length(chance: float, price: float) -> int:
    """Guesses whose chance, all before them being right too, is above the price of a row."""
    chance = min(chance, CHANCE_MAX)
    if chance <= max(price, CHANCE_MIN):
        return 0
    return min(DRAFT_MAX, int(math.log(price) / math.log(chance)))
