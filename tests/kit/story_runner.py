"""A runner of a GPU without a GPU: what the host does is real (slots, tables, texts, plans), and
what kernels do is a few lines of Python that look at every address.

A token's key and value are a digest of all tokens before it under its version. A row checks that
the digests of its whole context stand in the blocks that its table names, and that nothing is read
or written outside of what it may. What it draws follows from the digest, so that `said` knows every
response beforehand. Needs Triton's Python, as `CudaRunner` does, but nothing of it runs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dora_rl.engine.cuda.buckets import Bucket
from dora_rl.engine.cuda.runner import CudaRunner, Flight
from dora_rl.engine.guessing import GUESSES_MAX
from dora_rl.engine.plan import Plan, Span
from dora_rl.engine.sequence import Request, sampling_key
from dora_rl.engine.tensors.sampler import Drawn
from dora_rl.types import Version

VOCAB, STOP, BITS = 97, 0, 16
NOISE, STOPS = 9, 70  # one token in so many is the request's own, and ends it


def mixed(*numbers: int) -> int:
    found = 0x9E3779B97F4A7C15
    for number in numbers:
        found = ((found ^ (number & (1 << 64) - 1)) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        found ^= found >> 29
    return found & (1 << 48) - 1


def drawn_at(version: Version, key: int, index: int, before: int, token: int) -> int:
    """Token `index` of a response, behind two tokens."""
    own = mixed(key, index)
    if own % STOPS == 0:
        return STOP
    if own % NOISE == 0:
        return 1 + own // NOISE % (VOCAB - 1)
    return 1 + mixed(version, before, token) % (VOCAB - 1)


def said(request: Request, version: Version) -> list[int]:
    """The response to a request."""
    tokens, key = [0, *request.prompt_ids], sampling_key(request.seed, request.id)
    first = len(tokens)
    while len(tokens) - first < request.params.tokens_max:
        tokens.append(drawn_at(version, key, len(tokens) - first, *tokens[-2:]))
        if tokens[-1] in request.params.stop_ids:
            break
    return tokens[first:]


class StoryRunner(CudaRunner):
    """`fails` says before each pass whether memory runs out in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.random, self.failing = random.Random(1), 0.0
        self._versions: dict[int, Version] = {}  # by slot of weights
        self._before: dict[int, tuple[int, int, int]] = {}  # digest -> digest, token, one before it
        self.num_guessed = self.num_right = self.rows_most = 0

    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> Flight:
        self._versions = {slot: version for version, slot in slots.items()}
        return super().launch(plan, slots)

    # ------------------------------------------------------------------ the cache

    def _digest(self, slot: int, position: int) -> int:
        place = self._place(slot, position)
        parts = self.cache.kv[0, 0, place[0], 0, place[1], :3].tolist()
        return sum(int(part) << BITS * i for i, part in enumerate(parts))

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        assert 0 <= slot < self.slots.num_slots, slot
        assert 0 <= position < self.context, position
        block = int(self.slots.table[slot, position // self.options.block_tokens])
        assert 0 <= block < self.cache.num_blocks, (slot, position, block)
        return block, position % self.options.block_tokens

    def _row(self, slot: int, position: int, token: int, version: Version) -> int:
        """Key and value of a token. Returns the digest."""
        assert 0 <= token < VOCAB, token
        digest = self._digest(slot, position - 1) if position else mixed(version)
        before = self._before[digest][1] if position else 0
        found = mixed(digest, token, version)
        self._before[found] = digest, token, before
        place = self._place(slot, position)
        parts = [found >> BITS * i & (1 << BITS) - 1 for i in range(3)]
        self.cache.kv[0, 0, place[0], 0, place[1], :3] = torch.tensor(parts, dtype=torch.float32)
        if position and self.random.random() < 0.1:
            for earlier in range(position - 1, -1, -1):
                assert self._digest(slot, earlier) == digest, (slot, position, earlier)
                digest = self._before[digest][0]
            assert digest == mixed(version), "its first token is of another version"
        return found

    def _drawn_by(self, slot: int, position: int, digest: int, version: Version) -> int:
        _, token, before = self._before[digest]
        index = position + 1 - int(self.slots.prompt[slot])
        return drawn_at(version, int(self.slots.key[slot]), index, before, token)

    # ------------------------------------------------------------------- passes

    def _maybe_fail(self) -> None:
        if self.failing and self.random.random() < self.failing:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def _prefill(self, slot: int, spans: list[Span], flight: Flight) -> None:
        version, drawn = self._versions[slot], []
        for span in spans:
            digest = 0
            for n, token in enumerate(span.seq.row_ids(span.start, span.num_rows, span.drafts)):
                digest = self._row(span.seq.slot, span.start + n, token, version)
            assert span.num_logits <= 1, "nothing is scored here"
            if span.num_logits:
                last = span.start + span.num_rows - 1
                drawn.append((span, self._drawn_by(span.seq.slot, last, digest, version)))
        self._maybe_fail()
        for span, token in drawn:
            self.slots.last_token[span.seq.slot] = token
            self.slots.position[span.seq.slot] = span.start + span.num_rows
        self.slots.mark([span for span, _ in drawn])
        if drawn:
            tokens = torch.tensor([token for _, token in drawn])
            none = None
            result = Drawn(tokens, -tokens / 8, none, none, none)
            flight.parts.append(([span for span, _ in drawn], result))

    def _results(self, count: int) -> Tensor:
        shape = (self.slots.steps_max, 2, count)
        if count not in self._drawn:
            self._drawn[count] = torch.zeros(shape, dtype=torch.int32)
        return self._drawn[count]

    def _write(self, out: Tensor, row: int, token: int) -> None:
        place = (int(self.slots.step) - 1) % self.slots.steps_max
        out[place, 0, row] = token
        out[place, 1].view(torch.float32)[row] = -token / 8

    def _drawing_pass(self, bucket: Bucket, slots: Tensor) -> Tensor:
        out, state = self._results(len(slots)), self.slots
        self._maybe_fail()
        state.step += 1
        seen: set[int] = set()
        for row, slot in enumerate(slots.tolist()):
            if slot == state.num_slots:
                continue
            assert slot not in seen, "two rows of a slot"
            seen.add(slot)
            version = self._versions[bucket.first + row // bucket.per_version]
            position, token = int(state.position[slot]), int(state.last_token[slot])
            digest = self._row(slot, position, token, version)
            state.last_token[slot] = token = self._drawn_by(slot, position, digest, version)
            state.position[slot] += 1
            self._write(out, row, token)
        return out

    def _guessing_pass(self, num_rows: int, bucket: Bucket, slots: Tensor) -> tuple[Tensor, Tensor]:
        guesser, state = self._guesser, self.slots
        assert guesser is not None
        told: Any = guesser._told
        out, count = self._results(bucket.num_versions * num_rows), len(slots)
        if count not in guesser._info:
            guesser._info[count] = torch.zeros((state.steps_max, 4, count), dtype=torch.int32)
        info = guesser._info[count]
        self._maybe_fail()
        step = int(state.step) % state.steps_max
        state.step += 1
        assert count == bucket.num_versions * bucket.per_version
        assert int(told.end[-1]) == 0 and (told.lists[-1] == -1).all(), "nobody's slot"
        for v in range(bucket.num_versions):
            used = v * num_rows
            mine = range(v * bucket.per_version, (v + 1) * bucket.per_version)
            left = num_rows - sum(self._room(told, int(slots[i])) > 0 for i in mine)
            assert left >= 0, "more requests than rows"
            for i in mine:
                slot = int(slots[i])
                room = self._room(told, slot)
                info[step, :, i] = torch.tensor([used, 0, 0, 0])
                if room <= 0:
                    continue
                guesses, past = self._look(told, slot)
                guesses = guesses[: min(room - 1, left)]
                left -= len(guesses)
                tokens = self._check(told, slot, bucket.first + v, guesses)
                info[step, :, i] = torch.tensor([used, 1 + len(guesses), len(tokens), past])
                for n, token in enumerate(tokens):
                    assert used + n < (v + 1) * num_rows
                    self._write(out, used + n, token)
                used += 1 + len(guesses)
        return out, info

    def _room(self, told: Any, slot: int) -> int:
        return int(told.end[slot]) - int(self.slots.position[slot])

    def _look(self, told: Any, slot: int) -> tuple[list[int], int]:
        """What stands behind the newest place like its own."""
        rows = [row for row in told.lists[slot].tolist() if row >= 0]
        position = int(self.slots.position[slot])
        if not rows or position < 1:
            return [], 0
        assert len(set(rows)) == len(rows) and max(rows) < len(told.text), rows
        newest = told.text[rows[0], position - 1 : position + 1].tolist()
        for row in rows:
            length = int(told.length[row])
            assert 0 <= length <= told.text.shape[1], length
            text = told.text[row, :length].tolist()
            assert all(0 <= token < VOCAB for token in text)
            for place in range(length - 1, 1, -1):
                if text[place - 2 : place] == newest and (row != rows[0] or place <= position):
                    return text[place : place + GUESSES_MAX], 2
        return [], 0

    def _check(self, told: Any, slot: int, weights: int, guesses: Sequence[int]) -> list[int]:
        """All rows are computed; what was drawn counts as far as the guesses are right."""
        state, version = self.slots, self._versions[weights]
        position, token = int(state.position[slot]), int(state.last_token[slot])
        self.rows_most = max(self.rows_most, 1 + len(guesses))
        tokens: list[int] = []
        is_right = True
        for n, given in enumerate([token, *guesses]):
            digest = self._row(slot, position + n, given, version)
            if is_right:
                tokens.append(self._drawn_by(slot, position + n, digest, version))
                is_right = n < len(guesses) and guesses[n] == tokens[-1]
        self.num_guessed += len(guesses)
        self.num_right += len(tokens) - 1
        state.last_token[slot] = tokens[-1]
        state.position[slot] += len(tokens)
        if (own := int(told.lists[slot, 0])) >= 0:
            assert position + 1 + len(tokens) <= told.text.shape[1]
            assert int(told.text[own, position]) == token, "its text is not what it says"
            told.text[own, position + 1 : position + 1 + len(tokens)] = torch.tensor(tokens)
            told.length[own] = position + len(tokens) + 1
        return tokens
