"""Guesses of what a request will say next: what stood behind the same words before.

For every prompt an index of what has been said to it: the prompt itself, the responses of its
samples, running and ended, and the request's own. A draft is what follows an earlier place where
the request's last tokens stood; of the `PLACES_MAX` newest such places that with the longest common
past, as far as `PAST_MAX` tokens back. Guesses of any version serve, for whoever verifies them asks
its own.

Pure, and lazy: tokens enter the index of a prompt when a draft for one of its requests is wanted.
Bounded: all texts together have at most `tokens_max` tokens. Where there are more, the prompts that
no request runs on go first, the longest unused before; then new texts are not taken in. A prompt
keeps at most `ANSWERS_MAX` ended responses and drops the older half of them at that.

    drafts = Drafts()
    drafts.open(request, prompt_ids, tokens)     tokens: a list that the caller goes on to extend
    drafts.draft(request, 4)                     up to four tokens, or none
    drafts.close(request)                        its response stays, for others
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dora_rl.types import RequestId

SUFFIX_MIN = 2  # tokens that must stand at both places
PAST_MAX = 16
PLACES_MAX = 8
ANSWERS_MAX = 32
TOKENS_MAX = 1 << 20  # about 150 bytes each once indexed
_OFFSET_BITS = 32
_OFFSETS = (1 << _OFFSET_BITS) - 1


@dataclass(slots=True, eq=False)
class _Text:
    """Prompt and response of a request. Places in it are known up to `end`, from `first` on; what
    is before is the prompt's own text."""

    tokens: Sequence[int]
    first: int
    number: int = 0  # in its index
    counted: int = 0  # tokens, when it began or ended
    end: int = 0
    before: array[int] = field(default_factory=lambda: array("q"))  # next older place of the same


@dataclass(slots=True, eq=False)
class _Answers:
    """What is known of one prompt: `last` has the newest place behind some tokens."""

    live: dict[RequestId, _Text] = field(default_factory=dict[RequestId, _Text])
    ended: list[_Text] = field(default_factory=list[_Text])
    texts: list[_Text] = field(default_factory=list[_Text])
    last: dict[int, int] = field(default_factory=dict[int, int])
    news: list[_Text] = field(default_factory=list[_Text])  # not running, places not all known
    num_tokens: int = 0  # counted of its texts


class Drafts:
    """See the module docstring. `suffix_min` tokens at least stand at both places."""

    def __init__(self, suffix_min: int = SUFFIX_MIN, tokens_max: int = TOKENS_MAX) -> None:
        self._suffix_min, self._tokens_max = suffix_min, tokens_max
        self._prompts: OrderedDict[tuple[int, ...], _Answers] = OrderedDict()
        self._prompt_of: dict[RequestId, tuple[int, ...]] = {}
        self.num_tokens = 0

    def __contains__(self, request: RequestId) -> bool:
        return request in self._prompt_of

    def open(self, request: RequestId, prompt: tuple[int, ...], tokens: Sequence[int]) -> None:
        """A request begins, or arrives with what it has: prompt and response."""
        self.close(request)
        answers = self._prompts.get(prompt)
        more = len(tokens) + (len(prompt) if answers is None else 0)
        if self.num_tokens + more > self._tokens_max and not self._make_room(more):
            return
        answers = self._prompts.get(prompt)
        if answers is None:
            answers = self._prompts[prompt] = _Answers()
            self._add(answers, _Text(prompt, self._suffix_min, end=self._suffix_min))
            answers.news.append(answers.texts[0])
        self._prompts.move_to_end(prompt)
        self._prompt_of[request] = prompt
        start = max(len(prompt), self._suffix_min)
        text = answers.live[request] = _Text(tokens, start, end=start)
        self._add(answers, text)

    def close(self, request: RequestId) -> None:
        """It ended or left. What it said stays until there is no room for it."""
        if (prompt := self._prompt_of.pop(request, None)) is None:
            return
        answers = self._prompts[prompt]
        text = answers.live.pop(request)
        text.tokens = array("i", text.tokens)
        answers.ended.append(text)
        answers.news.append(text)
        self._count(answers, text)
        if len(answers.ended) > ANSWERS_MAX:
            self._halve(answers)
        if self.num_tokens > self._tokens_max:
            self._make_room(0)

    def clear(self) -> None:
        self._prompts.clear()
        self._prompt_of.clear()
        self.num_tokens = 0

    def draft(self, request: RequestId, length: int) -> tuple[int, ...]:
        """Up to `length` tokens that may follow; nothing where nothing like it was said."""
        if (prompt := self._prompt_of.get(request)) is None:
            return ()
        answers = self._prompts[prompt]
        self._look_at_news(answers)
        tokens = answers.live[request].tokens
        end = len(tokens)
        if end < self._suffix_min:
            return ()
        best: tuple[int, int] = (0, 0)  # common past, tokens that follow
        found: tuple[int, ...] = ()
        place = answers.last.get(_key(tokens, end, self._suffix_min), -1)
        for _ in range(PLACES_MAX):
            if place < 0:
                break
            text, at = answers.texts[place >> _OFFSET_BITS], place & _OFFSETS
            past = _equal_past(tokens, end, text.tokens, at)
            rank = (past, min(length, len(text.tokens) - at))
            if past >= self._suffix_min and rank > best:
                best, found = rank, tuple(text.tokens[at : at + length])
            if best == (PAST_MAX, length):
                break
            place = text.before[at - text.first]
        return found

    # ----------------------------------------------------------------- inside

    def _add(self, answers: _Answers, text: _Text) -> None:
        text.number = len(answers.texts)
        answers.texts.append(text)
        self._count(answers, text)

    def _count(self, answers: _Answers, text: _Text) -> None:
        more, text.counted = len(text.tokens) - text.counted, len(text.tokens)
        answers.num_tokens += more
        self.num_tokens += more

    def _look_at_news(self, answers: _Answers) -> None:
        """Places in whatever was said since. A place has a token behind it, so that a request's end
        is never a place."""
        for text in answers.news:
            _enter(answers.last, text, self._suffix_min)
        answers.news.clear()
        for text in answers.live.values():
            if text.end < len(text.tokens):
                _enter(answers.last, text, self._suffix_min)

    def _halve(self, answers: _Answers) -> None:
        """Without the older half of the ended responses; the index is made anew."""
        del answers.ended[: len(answers.ended) // 2]
        kept = [answers.texts[0], *answers.ended, *answers.live.values()]
        answers.texts, answers.last, answers.news = [], {}, list(kept)
        for text in kept:
            text.end, text.before = text.first, array("q")
            text.number = len(answers.texts)
            answers.texts.append(text)
        now = sum(text.counted for text in kept)
        self.num_tokens += now - answers.num_tokens
        answers.num_tokens = now

    def _make_room(self, num_tokens: int) -> bool:
        """For so many more; only prompts that nobody runs on go."""
        for prompt in [prompt for prompt, answers in self._prompts.items() if not answers.live]:
            if self.num_tokens + num_tokens <= self._tokens_max:
                break
            self.num_tokens -= self._prompts.pop(prompt).num_tokens
        return self.num_tokens + num_tokens <= self._tokens_max


def _enter(last: dict[int, int], text: _Text, suffix_min: int) -> None:
    tokens, number = text.tokens, text.number << _OFFSET_BITS
    for at in range(text.end, len(tokens)):
        key = _key(tokens, at, suffix_min)
        text.before.append(last.get(key, -1))
        last[key] = number | at
    text.end = len(tokens)


def _key(tokens: Sequence[int], end: int, count: int) -> int:
    """Of the `count` tokens before `end`: one number, the same for the same tokens."""
    key = 0
    for token in tokens[end - count : end]:
        key = key << _OFFSET_BITS | token
    return key


def _equal_past(one: Sequence[int], end: int, other: Sequence[int], at: int) -> int:
    """How many tokens before `end` of one equal those before `at` of the other."""
    count, most = 0, min(PAST_MAX, end, at)
    while count < most and one[end - 1 - count] == other[at - 1 - count]:
        count += 1
    return count
