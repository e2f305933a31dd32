"""Which texts a device has of each prompt, so that it can look for guesses in them by itself.

A text is prompt and response of one request and has a row of a table on the device. Rows of the
same prompt are listed for each of its requests, its own first: that is where the device looks (see
`cuda/guesser.py`). A text stays behind its request's end, for those that follow, until its row is
needed: first go texts of prompts that no request runs on, the longest unused before.

Pure. What the device must be told is kept until somebody asks: which lists changed, which rows have
tokens that it does not know.

    texts = Texts(num_rows=64)
    texts.open(request, prompt_ids, tokens)      tokens: a list that the caller goes on to extend
    texts.close(request)                         its tokens stay
    texts.rows(request)                          its own row, then others of its prompt
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise

from dora_rl.types import RequestId

LISTED = 16  # rows in which a request looks, its own among them
HEARD = 3  # other texts that the host looks in


@dataclass(slots=True, eq=False)
class Text:
    """`known` tokens of it are on the device as they are here."""

    row: int
    tokens: Sequence[int]
    known: int = 0


@dataclass(slots=True, eq=False)
class _Prompt:
    live: dict[RequestId, Text] = field(default_factory=dict[RequestId, Text])
    ended: list[Text] = field(default_factory=list[Text])  # oldest first


class Texts:
    """See the module docstring."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._prompts: OrderedDict[tuple[int, ...], _Prompt] = OrderedDict()
        self._prompt_of: dict[RequestId, tuple[int, ...]] = {}
        self._without: set[RequestId] = set()  # for which no row was free
        self._unlisted: set[RequestId] = set()  # whose lists changed
        self._unsent: dict[int, Text] = {}  # by row: ended, with tokens that were never sent

    def __contains__(self, request: RequestId) -> bool:
        return request in self._prompt_of or request in self._without

    def open(self, request: RequestId, prompt: tuple[int, ...], tokens: Sequence[int]) -> None:
        """A request runs. Where no row is free it has no text."""
        self.close(request)
        if (row := self._take_row()) is None:
            self._without.add(request)
            return
        group = self._prompts.setdefault(prompt, _Prompt())
        self._prompts.move_to_end(prompt)
        self._prompt_of[request] = prompt
        group.live[request] = Text(row, tokens)
        self._unlisted.add(request)
        if len(group.live) + len(group.ended) <= LISTED:  # there is room in the others' lists
            self._unlisted.update(group.live)

    def close(self, request: RequestId) -> None:
        """It ended or left. What it said stays until its row is needed."""
        self._without.discard(request)
        if (prompt := self._prompt_of.pop(request, None)) is None:
            return
        group = self._prompts[prompt]
        text = group.live.pop(request)
        text.tokens = array("i", text.tokens)
        text.known = min(text.known, len(text.tokens))
        group.ended.append(text)
        # Behind its end the device may have gone on: how long it is must be said again.
        self._unsent[text.row] = text
        self._unlisted.discard(request)
        if len(group.ended) >= LISTED:
            self._give_back(group.ended.pop(0))
            self._unlisted.update(group.live)

    def clear(self) -> None:
        for request in [*self._prompt_of, *self._without]:
            self.close(request)

    def text(self, request: RequestId) -> Text | None:
        """Of a request that is open."""
        prompt = self._prompt_of.get(request)
        return None if prompt is None else self._prompts[prompt].live[request]

    def rows(self, request: RequestId) -> list[int]:
        """Where it looks, its own row first; nowhere, if it has none."""
        if (prompt := self._prompt_of.get(request)) is None:
            return []
        group = self._prompts[prompt]
        own = group.live[request]
        every = chain(group.live.values(), reversed(group.ended))
        others = islice((text.row for text in every if text is not own), LISTED - 1)
        return [own.row, *others]

    def foretold(self, request: RequestId, newest: int) -> tuple[int, int]:
        """Of its newest response tokens, at most so many: how many there are, and how many of them
        followed the same two tokens before, in it or in a few others of its prompt."""
        if (prompt := self._prompt_of.get(request)) is None:
            return 0, 0
        group = self._prompts[prompt]
        own = group.live[request].tokens
        first = max(len(prompt), len(own) - newest, 2)
        follow: dict[tuple[int, int], int] = {}
        every = chain(group.live.values(), reversed(group.ended))
        for text in islice((text for text in every if text.tokens is not own), HEARD):
            _note_pairs(follow, text.tokens[max(0, len(prompt) - 2) :])
        _note_pairs(follow, own[:first])
        right = 0
        for index in range(first, len(own)):
            pair = own[index - 2], own[index - 1]
            right += follow.get(pair) == own[index]
            follow[pair] = own[index]
        return max(0, len(own) - first), right

    def settle(self, request: RequestId) -> None:
        """It has what it has: what the device went on with behind that counts as unknown."""
        if (text := self.text(request)) is not None:
            text.known = min(text.known, len(text.tokens))

    def take_unlisted(self, request: RequestId) -> bool:
        """Whether its rows changed since this was asked last."""
        if request not in self._unlisted:
            return False
        self._unlisted.remove(request)
        return True

    def take_unsent(self) -> list[Text]:
        """Ended texts that the device does not have as they are; it has them now."""
        found = list(self._unsent.values())
        self._unsent.clear()
        return found

    # ----------------------------------------------------------------- inside

    def _take_row(self) -> int | None:
        if not self._free:
            self._make_room()
        return self._free.pop() if self._free else None

    def _make_room(self) -> None:
        """The longest unused prompt that nobody runs on goes, else the oldest ended response."""
        for prompt, group in self._prompts.items():
            if not group.live:
                for text in group.ended:
                    self._give_back(text)
                del self._prompts[prompt]
                return
        for group in self._prompts.values():
            if group.ended:
                self._give_back(group.ended.pop(0))
                self._unlisted.update(group.live)
                return

    def _give_back(self, text: Text) -> None:
        self._unsent.pop(text.row, None)
        self._free.append(text.row)


def _note_pairs(follow: dict[tuple[int, int], int], tokens: Sequence[int]) -> None:
    """What follows each two tokens, the last time that they stand there."""
    follow.update(zip(pairwise(tokens), tokens[2:], strict=False))
