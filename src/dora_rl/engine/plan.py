"""What a step does, as values: cache operations in order, then spans of rows.

Pure data between the scheduler, which decides, and the runner, which performs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from dora_rl.engine.sequence import Sequence


class Copy(NamedTuple):
    """Copy on write: `target` gets the content of the shared block `source`."""

    source: int
    target: int


class Spill(NamedTuple):
    """Move the blocks' content to the host, under the sequence's id."""

    seq: Sequence
    blocks: tuple[int, ...]


class Scrub(NamedTuple):
    """Zero blocks that held NaN: masked values are multiplied by zero, and 0 * NaN is NaN."""

    blocks: tuple[int, ...]


class Restore(NamedTuple):
    """Bring the spilled content back into new blocks."""

    seq: Sequence
    blocks: tuple[int, ...]


CacheOp: TypeAlias = Copy | Spill | Restore | Scrub


class Span(NamedTuple):
    """`num_rows` rows of one sequence from position `start` on.

    The `num_logits` rows from position `logits_start` on need logits: each scores the known token
    that follows it, and the last one draws a new token when `sample` is set.

    `drafts` are guesses of the tokens behind the known ones: the last rows are theirs, and each of
    them draws too. What a row draws counts where every guess before it was what was drawn there.
    """

    seq: Sequence
    start: int
    num_rows: int
    logits_start: int
    num_logits: int
    sample: bool
    drafts: tuple[int, ...] = ()


@dataclass(slots=True)
class Plan:
    """One step: cache operations first, in order, then the rows.

    `repeat` > 1 is a burst: every span is one row that draws, and so are the rows at the
    `repeat - 1` positions behind it, each with the token that the row before it drew.

    With `guess_rows` every step of a burst has so many rows of a version, those that the spans do
    not need for guesses that the device finds itself. Where a span begins and how far it comes, who
    reads it says; `start` is where it is at least.
    """

    cache_ops: list[CacheOp] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    repeat: int = 1
    guess_rows: int = 0

    def is_decode(self) -> bool:
        """Whether it does nothing but decode."""
        return bool(self.spans) and not self.cache_ops and all(s.num_rows == 1 for s in self.spans)

    def sequences(self) -> list[Sequence]:
        """All whose cache it changes, each once."""
        moved = [op.seq for op in self.cache_ops if isinstance(op, Spill | Restore)]
        return list({seq.id: seq for seq in [*moved, *(span.seq for span in self.spans)]}.values())


def most_of(sequences: Iterable[Sequence], together: bool) -> tuple[int, int]:
    """How many versions they have, and how many of them one version has at most; `together`: all
    versions are one batch, as adapters are."""
    counts = Counter(0 if together else seq.version for seq in sequences)
    return len(counts), max(counts.values(), default=0)


TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]


class StepResult(NamedTuple):
    """Tokens scored or drawn for one span, oldest first; `raw_logprobs` may be empty. `guessed`: by
    the device itself, how many, and how many right."""

    span: Span
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    guessed: tuple[int, int] = (0, 0)
