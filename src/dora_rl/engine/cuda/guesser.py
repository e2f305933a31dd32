"""What a GPU needs to guess by itself: the texts of `texts.py` as tensors, a pass, how to read it.

A burst with guesses is a number of launches of one graph, as every burst is. In each of them the
device finds guesses, computes their rows beside those of the newest tokens, draws, and goes on
behind what was right (`kernels/guesses.py`). The host says before the first one which texts there
are and how far the cache has room, and reads behind the last one what became of it. The next burst
may be launched before that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora_rl.engine.cuda.kernels import guesses
from dora_rl.engine.cuda.slots import DeviceSlots
from dora_rl.engine.guessing import GUESSES_MAX, PAST_MAX, STEPS, Guessing
from dora_rl.engine.plan import Span, StepResult
from dora_rl.engine.texts import LISTED, Text, Texts

TEXT_BYTES_MAX = 256 << 20
ROWS_EACH = 4  # texts for each slot, where there is memory
LENGTHS_EVERY = 16  # bursts, before the device hears how likely guesses are by now


@dataclass(slots=True)
class Flown:
    """A burst to be read: the spans' places among its requests, and what comes back."""

    spans: list[Span]
    places: list[int]
    most: tuple[int, int]  # versions; requests of one
    rows: int
    drawn: Tensor  # [step, (token, bits of the log-prob), row]
    info: Tensor  # [step, guesses.INFO, request]


class Moment:
    """When the device comes to where this is made; without a GPU, when it is made."""

    def __init__(self, on_gpu: bool) -> None:
        self._event: torch.cuda.Event | None = None
        self._seconds = time.perf_counter()
        if on_gpu:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def until(self, other: Moment) -> float:
        """Seconds, once the device has come to the other one."""
        if self._event is None or other._event is None:
            return other._seconds - self._seconds
        return self._event.elapsed_time(other._event) / 1e3


@dataclass(slots=True)
class Timed:
    """A launch that does nothing but decode: versions, requests of one at most, rows for guesses,
    steps."""

    most: tuple[int, int]
    rows: int
    steps: int
    began: Moment
    ended: Moment | None = None

    def seconds(self) -> float:
        """Of a step, once the device has done it."""
        assert self.ended is not None
        return self.began.until(self.ended) / self.steps


def places_for(burst_max: int) -> int:
    """Steps of the longest burst."""
    return max(burst_max, STEPS)


class Guesser:
    """The tensors, and what the host knows of them."""

    guesses_max = GUESSES_MAX

    def __init__(self, slots: DeviceSlots, context: int, device: str) -> None:
        self._slots, self._context = slots, context
        width = context + 2
        num_rows = min(ROWS_EACH * slots.num_slots, TEXT_BYTES_MAX // (4 * width))
        self.guessing = Guessing(Texts(max(num_rows, slots.num_slots)))
        count = slots.num_slots + 1
        self._told = guesses.Told(
            torch.zeros((self.guessing.texts.num_rows, width), dtype=torch.int32, device=device),
            torch.zeros(self.guessing.texts.num_rows, dtype=torch.int32, device=device),
            torch.full((count, LISTED), -1, dtype=torch.int32, device=device),
            torch.zeros(count, dtype=torch.int32, device=device),
            torch.tensor(self.guessing.lengths(), dtype=torch.int32, device=device),
        )
        self._where = guesses.Where(slots.last_token, slots.position, slots.prompt, slots.step)
        self._info: dict[int, Tensor] = {}  # by number of requests
        self._num_flown = self._num_read = 0
        self._listed: dict[int, object] = {}  # by slot: whose lists are there
        self._position: dict[int, int] = {}  # by slot, as far as it was read

    # ------------------------------------------------------------------ the pass

    def enter(self, slots: Tensor, embed: Tensor, num_rows: int) -> tuple[guesses.Entered, Tensor]:
        """Rows of a pass for the requests in `slots`, and where it says what becomes of them."""
        count = len(slots)
        if count not in self._info:
            shape = (self._slots.steps_max, guesses.INFO, count)
            self._info[count] = torch.zeros(shape, dtype=torch.int32, device=slots.device)
        info = self._info[count]
        return guesses.enter(slots, self._where, self._told, info, embed, num_rows), info

    def accept(self, slots: Tensor, tokens: Tensor, drawn: Tensor, info: Tensor) -> None:
        guesses.accept(slots, self._where, self._told, info, tokens, drawn)

    # ------------------------------------------------------------ before a burst

    def prepare(self, spans: Sequence[Span], block_tokens: int) -> int:
        """Tell the device what it does not know. Returns how far requests may come. While another
        burst is in flight, the device alone knows where its requests are."""
        texts, told = self.guessing.texts, self._told
        is_first = self._num_flown == self._num_read
        fresh = [text for text in texts.take_unsent() if text.tokens]
        lengths = {text.row: len(text.tokens) for text in fresh}
        if is_first:
            self._slots.sync_tokens(spans)
            for span in spans:
                self._position[span.seq.slot] = span.start
                if (text := texts.text(span.seq.id)) is not None:
                    text.known = min(text.known, span.start + 1)
                    lengths[text.row] = span.start + 1
                    fresh.append(text)
        self._send(fresh, lengths)
        self._list(spans)
        ends = [self._end(span, block_tokens) for span in spans]
        slots = self._slots.upload([span.seq.slot for span in spans], torch.int64)
        told.end[slots] = self._slots.upload(ends, torch.int32)
        if (self._num_flown + 1) % LENGTHS_EVERY == 0:
            told.lengths.copy_(self._slots.upload(self.guessing.lengths(), torch.int32))
        return max(end - span.start for end, span in zip(ends, spans, strict=True))

    def flew(self) -> None:
        """What was prepared is in flight."""
        self._num_flown += 1

    def _send(self, fresh: Sequence[Text], lengths: dict[int, int]) -> None:
        """Tokens that the device does not know, and how long the texts are then."""
        width = self._told.text.shape[1]
        places: list[NDArray[np.int64]] = []
        tokens: list[NDArray[np.int32]] = []
        for text in fresh:
            end = lengths[text.row]
            if text.known < end:
                start = text.row * width
                places.append(np.arange(start + text.known, start + end))
                tokens.append(np.array(text.tokens[text.known : end], np.int32))
            text.known = end
        if places:
            where = self._slots.upload(np.concatenate(places), torch.int64)
            values = self._slots.upload(np.concatenate(tokens), torch.int32)
            self._told.text.view(-1)[where] = values
        if lengths:
            rows = self._slots.upload(list(lengths), torch.int64)
            self._told.length[rows] = self._slots.upload(list(lengths.values()), torch.int32)

    def _list(self, spans: Sequence[Span]) -> None:
        """Where each request looks, where that changed."""
        texts = self.guessing.texts
        changed: list[Span] = []
        for span in spans:
            is_new = self._listed.get(span.seq.slot) is not span.seq
            if texts.take_unlisted(span.seq.id) or is_new:
                self._listed[span.seq.slot] = span.seq
                changed.append(span)
        if changed:
            lists = np.full((len(changed), LISTED), -1, np.int32)
            for index, span in enumerate(changed):
                rows = texts.rows(span.seq.id)
                lists[index, : len(rows)] = rows
            slots = self._slots.upload([span.seq.slot for span in changed], torch.int64)
            self._told.lists[slots] = self._slots.upload(lists, torch.int32)

    def _end(self, span: Span, block_tokens: int) -> int:
        seq = span.seq
        last = seq.num_prompt + seq.response_max - 1  # its row draws nothing that is wanted
        return min(len(seq.blocks) * block_tokens, last, self._context)

    # ------------------------------------------------------------ behind a burst

    def read(self, flown: Flown) -> list[StepResult]:
        """What each span drew, oldest first."""
        self._num_read += 1
        info = flown.info.numpy()[:, :, flown.places]
        begin, taken, gained, past = (info[:, i] for i in range(guesses.INFO))
        self._learn(flown, taken, gained, past)
        nth = np.arange(GUESSES_MAX + 1)
        rows = begin[:, :, None] + nth
        counts = (nth < gained[:, :, None]).transpose(1, 0, 2)
        drawn = flown.drawn.numpy()
        steps = np.arange(len(drawn))[:, None, None]
        rows = np.minimum(rows, drawn.shape[2] - 1)
        tokens = drawn[steps, 0, rows].transpose(1, 0, 2)[counts].tolist()
        bits = drawn[steps, 1, rows].transpose(1, 0, 2)[counts]
        logprobs = np.ascontiguousarray(bits).view(np.float32).tolist()
        alive = taken > 0
        drafted = np.where(alive, taken - 1, 0).sum(0).tolist()
        right = np.where(alive, gained - 1, 0).sum(0).tolist()
        results: list[StepResult] = []
        start = 0
        for index, (span, count) in enumerate(
            zip(flown.spans, gained.sum(0).tolist(), strict=True)
        ):
            part = slice(start, start + count)
            start += count
            guessed = (drafted[index], right[index])
            results.append(StepResult(span, tokens[part], logprobs[part], [], [], guessed))
            self._arrived(span, count)
        return results

    def _arrived(self, span: Span, count: int) -> None:
        """The device has so many tokens more of a request."""
        seq = span.seq
        if seq.slot < 0:
            return
        self._position[seq.slot] += count
        self._slots.mark_at(seq, self._position[seq.slot])
        if (text := self.guessing.texts.text(seq.id)) is not None:
            text.known += count

    def _learn(
        self,
        flown: Flown,
        taken: NDArray[np.int32],
        gained: NDArray[np.int32],
        past: NDArray[np.int32],
    ) -> None:
        alive = taken > 0
        if not alive.any():
            return
        guessed = alive & (taken > 1)
        right = (gained - 1)[guessed]
        tried = np.minimum(gained, taken - 1)[guessed]
        bins = past[guessed]
        self.guessing.learn(
            np.bincount(bins, tried, PAST_MAX + 1).tolist(),
            np.bincount(bins, right, PAST_MAX + 1).tolist(),
        )
        self.guessing.make(*flown.most, flown.rows, float(gained[alive].mean()))

    def forget(self) -> None:
        """Nothing is in flight any more, and nobody reads it."""
        self._num_read = self._num_flown
