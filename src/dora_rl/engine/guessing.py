"""When a device guesses by itself, and how many rows it has for that: what is measured to pay.

A device that finds guesses itself (`cuda/guesser.py`) decodes in bursts of steps with a fixed
number of rows: one for each request, the others for the guesses that are likeliest to be right. How
many rows is decided here, for each size of batch: without guesses, with few, or with many. Each way
is tried for a short while, and its worth is what was measured: tokens of a request in a step, over
the time that the device takes for a step.

    looking    at the way without guesses, then at one with few more rows; at the others only where
               that one brought something
    using      the best, if it is better by `GAIN_MIN`; now and then the others are looked at again
    asleep     no guesses: each look in vain doubles the time until the next one

A look breaks the order of things: what is in flight is read first, and the device is told all
texts. So before the first one the host has a look of its own, at the newest tokens of one request
after the other: would other texts have foretold them? Where hardly any, the device does what it
does without guesses, and nothing is measured. A look ends at once where nothing is guessed right.

Pure. Decides by time, so two runs may guess differently; what they generate is the same (see
`Engine`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from dora_rl.engine.texts import Texts
from dora_rl.types import RequestId, Version

GUESSES_MAX = 8  # of a request in a step
PAST_MAX = 8  # tokens that are compared to find a place like the present one
CHOICES = 16  # how likely a guess must be: the kernel takes the likeliest that there are rows for
CHANCES = (0.0, 0.2, 0.35, 0.5, 0.6, 0.68, 0.74, 0.78, 0.85)  # by common past, until measured
CHANCE_LEAST, CHANCE_MOST = 0.05, 0.97
PRIOR = 50.0  # guesses that the first chances weigh as
FORGET = 0.98  # of what older bursts say about the chances, by each new one
# Of a version: few sizes, for each is captured and timed apart. Beyond, no row is to spare.
ROWS = (16, 32, 48, 64, 96, 128, 192, 256)
ROWS_STEP = 16
SHARES = (1.5, 2.0, 4.0)  # rows for each request
STEPS, LOOK_STEPS, QUEUED_STEPS = 8, 4, 2  # of a burst; in a look; where others wait for a place
LOOK_PLAIN, LOOK_GUESSED = 12, 20  # steps of a look
SLEEP_MIN, SLEEP_MAX = 256, 4096
USE_STEPS = 512  # before others are looked at again
GAIN_MIN = 1.03  # better than without guesses, to be used
GAIN_QUEUED = 1.1  # where others wait for a place, which is found free a burst later
HOPE = 0.9  # of the worth without guesses, or of the best way's: more rows are tried
NOTHING = 0.03  # tokens more in a step: less is nothing
RATE = 0.25  # of exponential averages
HINT_EVERY, HINT_TOKENS = 32, 32  # steps between two looks of the host; tokens of a request
HINTS_MIN = 2  # before anything is decided
PROMISE = 0.08  # of tokens that are foretold: with fewer the device need not look


class Way(NamedTuple):
    """How many rows of a version (0: one each and no guess) in a burst of so many steps."""

    rows: int
    steps: int


@dataclass(slots=True)
class _Arm:
    """A way to decode, for one size of batch: seconds of a step, tokens of a request in a step."""

    seconds: float = 0.0
    made: float = 1.0
    num_timed: int = 0
    num_made: int = 0
    seen: int = -1  # step at which it was last looked at

    def time(self, seconds: float) -> None:
        self.num_timed += 1
        if self.num_timed <= 2:
            self.seconds = min(seconds, self.seconds or seconds)
        else:  # a capture, or a machine that stands still, is no time of a step
            self.seconds += (min(seconds, 2 * self.seconds) - self.seconds) * RATE

    def make(self, tokens: float) -> None:
        self.num_made += 1
        self.made += (tokens - self.made) * (1.0 if self.num_made == 1 else RATE)


Size = tuple[int, int]  # versions; requests of one, at most


@dataclass(slots=True)
class _Book:
    """What is known of one size of batch."""

    arms: dict[int, _Arm] = field(default_factory=dict[int, _Arm])  # by rows
    sleep: int = SLEEP_MIN
    wake: int = 0  # step before which nothing is looked for


class Guessing:
    """`fixed`: always so many rows for each request, whatever they cost."""

    def __init__(self, texts: Texts, fixed: float = 0.0) -> None:
        self.texts, self.fixed = texts, fixed
        self.drafted: Counter[Version] = Counter()
        self.accepted: Counter[Version] = Counter()
        self.right = [0.0] * (PAST_MAX + 1)  # of guesses with so long a past
        self.tried = [0.0] * (PAST_MAX + 1)
        self._books: dict[Size, _Book] = {}
        self._size: Size = (0, 0)
        self._way, self._left = Way(0, 1), 0
        self._step = self._next_hint = 0
        self._num_hints, self._promise = 0, 0.0

    def counts(self) -> dict[Version, tuple[int, int]]:
        """Drafted and accepted tokens of each version."""
        return {version: (n, self.accepted[version]) for version, n in self.drafted.items()}

    def profile(self) -> list[tuple[int, int, int, float, float]]:
        """Versions, requests, rows (0: no guesses), ms of a step, tokens of a request in it."""
        return [
            (*size, rows, 1e3 * arm.seconds, arm.made)
            for size, book in sorted(self._books.items())
            for rows, arm in sorted(book.arms.items())
            if arm.num_timed
        ]

    # -------------------------------------------------------- a look of the host

    @property
    def is_awake(self) -> bool:
        """Whether there is anything to guess, as far as the host has seen."""
        return bool(self.fixed) or (self._num_hints >= HINTS_MIN and self._promise >= PROMISE)

    def look(self, requests: Collection[RequestId]) -> None:
        """Now and then, at one of those that run: how many of its newest tokens were foretold."""
        if self.fixed or not requests or self._step < self._next_hint:
            return
        index = self._step // HINT_EVERY % len(requests)
        request = next(islice(requests, index, None))
        self.hint(*self.texts.foretold(request, HINT_TOKENS))
        self._next_hint = self._step + HINT_EVERY

    def hint(self, tried: int, right: int) -> None:
        """Of so many tokens so many were foretold."""
        if tried:
            self._num_hints += 1
            self._promise += (right / tried - self._promise) * max(RATE, 1 / self._num_hints)

    # --------------------------------------------------------------- the choice

    def way(self, num_versions: int, count: int, queued: bool = False) -> Way:
        """For the next step or burst, of at most `count` requests of a version; `queued`: others
        wait for a place."""
        if not count or not self.is_awake:
            return Way(0, 1)
        if self.fixed:
            rows = min(max(ROWS_STEP, _rounded(int(count * self.fixed))), 2 * ROWS[-1])
            return Way(rows if rows > count else 0, QUEUED_STEPS if queued else STEPS)
        size = (num_versions, _rounded(count))
        if size != self._size or self._left <= 0:
            self._size = size
            book = self._books.setdefault(size, _Book())
            gain = GAIN_QUEUED if queued else GAIN_MIN
            self._way, self._left = self._choose(book, size, gain)
        return self._way._replace(steps=QUEUED_STEPS) if queued else self._way

    def _choose(self, book: _Book, size: Size, gain: float) -> tuple[Way, int]:
        """What is done next, and for how many steps."""
        without = book.arms.setdefault(0, _Arm())
        ways = rows_for(size[1])
        if not ways or self._step < book.wake:
            return Way(0, 1), max(1, book.wake - self._step if ways else USE_STEPS)
        if without.num_timed < 2 or self._step - without.seen > 4 * USE_STEPS:
            without.seen = self._step
            return Way(0, 1), LOOK_PLAIN
        best = 0
        for rows in ways:
            arm = book.arms.setdefault(rows, _Arm())
            is_old = arm.seen < 0 or self._step - arm.seen > 4 * USE_STEPS
            # The batch may change its size in the middle of a look.
            if is_old or (arm.num_timed < 2 and not self._is_hopeless(book, rows)):
                arm.seen = self._step
                return Way(rows, LOOK_STEPS), LOOK_GUESSED
            if self._is_hopeless(book, rows):
                break  # more rows cost more
            if not best or self._worth(book, rows) > self._worth(book, best):
                best = rows
            elif self._worth(book, rows) < HOPE * self._worth(book, best):
                break
        if best and self._worth(book, best) > gain * self._worth(book, 0):
            book.sleep = SLEEP_MIN
            return Way(best, STEPS), USE_STEPS
        book.wake = self._step + book.sleep
        book.sleep = min(2 * book.sleep, SLEEP_MAX)
        for rows in ways:  # to be looked at when it wakes
            book.arms.setdefault(rows, _Arm()).seen = -1
        return Way(0, 1), book.wake - self._step

    def _is_hopeless(self, book: _Book, rows: int) -> bool:
        """Nothing is guessed right, or it costs too much."""
        arm, without = book.arms[rows], book.arms.get(0)
        if arm.num_made and arm.made < 1 + NOTHING:
            return True
        if arm.num_timed < 2 or without is None or without.num_timed < 2:
            return False
        return self._worth(book, rows) < HOPE * self._worth(book, 0)

    def _worth(self, book: _Book, rows: int) -> float:
        """Tokens of a request in a second."""
        arm = book.arms[rows]
        return arm.made / arm.seconds if arm.seconds else 0.0

    # ------------------------------------------------------------- what happened

    def end(self, steps: int) -> None:
        """So many were launched."""
        self._step += steps
        self._left -= steps

    def time(self, num_versions: int, count: int, rows: int, seconds: float) -> None:
        """A step took so long that did nothing but decode `count` requests of a version at most."""
        book = self._books.setdefault((num_versions, _rounded(count)), _Book())
        book.arms.setdefault(rows, _Arm()).time(seconds)

    def learn(self, tried: Sequence[float], right: Sequence[float]) -> None:
        """Of a burst: by common past, how many guesses were checked and how many were right."""
        for past in range(PAST_MAX + 1):
            self.tried[past] = self.tried[past] * FORGET + tried[past]
            self.right[past] = self.right[past] * FORGET + right[past]

    def make(self, num_versions: int, count: int, rows: int, made: float) -> None:
        """Of a burst: tokens of a request in a step."""
        size = (num_versions, _rounded(count))
        book = self._books.setdefault(size, _Book())
        book.arms.setdefault(rows, _Arm()).make(made)
        is_look = self._way.steps == LOOK_STEPS and self._way.rows == rows and self._size == size
        if is_look and self._is_hopeless(book, rows):
            self._left = 0

    def count(self, version: Version, drafted: int, accepted: int) -> None:
        """Guesses that were checked, and those that became tokens of a response."""
        self.drafted[version] += drafted
        self.accepted[version] += accepted

    def lengths(self) -> list[list[int]]:
        """[choice, past] -> how many guesses a request with that common past has: those whose
        chance, all before them being right too, is at least the choice's. Rises with the choice."""
        chances = [
            min(CHANCE_MOST, (right + PRIOR * first) / (tried + PRIOR))
            for first, right, tried in zip(CHANCES, self.right, self.tried, strict=True)
        ]
        least = [0.9 * (CHANCE_LEAST / 0.9) ** (i / (CHOICES - 1)) for i in range(CHOICES)]
        return [[_length(chance, bound) for chance in (0.0, *chances[1:])] for bound in least]


def rows_for(count: int) -> list[int]:
    """Rows of a version that are tried for so many requests, fewest first."""
    rows = {next((n for n in ROWS if n >= int(count * share)), 0) for share in SHARES}
    return sorted(n for n in rows if n > count)


def _rounded(count: int) -> int:
    """To a multiple of 16; few as powers of two."""
    if count <= ROWS_STEP:
        return 1 << max(0, count - 1).bit_length()
    return -(-count // ROWS_STEP) * ROWS_STEP


def _length(chance: float, least: float) -> int:
    length, all_right = 0, chance
    while all_right >= least and length < GUESSES_MAX:
        length, all_right = length + 1, all_right * chance
    return length
