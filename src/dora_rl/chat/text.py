"""Token ids to text as they come, without half characters and without the stop string.

Invariant: the pieces of one response add up to the decoded response, cut at the stop string that
is complete first (of several that come with one piece, the one that begins first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that end too early
WINDOW = 16  # tokens decoded again with each piece, so that spaces and joins come out right


class TextStream:
    """`push` returns what is certain by now; `finish` the rest."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._start = 0  # of the ids still decoded again
        self._seen = 0  # ids whose text is in `_text`
        self._before = ""  # text of the ids from `_start` to `_seen`
        self._text = ""
        self._given = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return self._text[: self._given]

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        self._take(final=False)
        return self._give(self._certain())

    def finish(self) -> str:
        self._take(final=True)
        self._certain()
        return self._give(len(self._text))

    def _take(self, final: bool) -> None:
        """Text of the new ids: the decoded window less the part of it that was decoded before."""
        if self.stopped or self._seen == len(self._ids):
            return
        after = self._decode(self._ids[self._start :])
        if after.endswith(BROKEN) and not final:
            return
        self._text += after[len(self._before) :]
        self._seen, self._before = len(self._ids), after
        if self._seen - self._start > 2 * WINDOW:
            self._start = self._seen - WINDOW
            self._before = self._decode(self._ids[self._start :])

    def _certain(self) -> int:
        """How far the text cannot become part of a stop string; cuts it where one is complete."""
        end, complete = clear_of(self._text, self._stops)
        if complete:
            self._text, self.stopped = self._text[:end], True
        return end

    def _give(self, end: int) -> str:
        start, self._given = self._given, max(self._given, end)
        return self._text[start : self._given]


def clear_of(text: str, marks: Sequence[str]) -> tuple[int, bool]:
    """Up to where the text holds no mark nor the beginning of one; whether one is complete.

    >>> clear_of("a</th", ["</think>"]), clear_of("a</think>b", ["</think>"])
    ((1, False), (1, True))
    """
    found = [at for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        return min(found), True
    held = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), held, -1):
            if text.endswith(mark[:length]):
                held = length
                break
    return len(text) - held, False
