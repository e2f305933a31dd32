"""Numbers and names read at many places of a byte string at once.

A reader of the event log as columns needs a few fields of a million lines; these read one field of
all of them in a handful of numpy operations on eight bytes at a time. Each function takes the
places where a field begins and gives its values and the places just behind it. What cannot be read
exactly (a number of 16 digits or more, a name without an end in sight) raises `Unusual`; nothing
is guessed.
"""

from __future__ import annotations

import json
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Places: TypeAlias = NDArray[np.int64]
Words: TypeAlias = NDArray[np.uint64]

_PAD = 1024
FLOAT_CHARS_MAX = 25
TEXT_WORDS_MAX = 100
_ONES = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x8080808080808080)
_DIGITS = np.uint64(0x3030303030303030)
_UP_TO_NINE = np.uint64(0x7676767676767676)  # carries into the high bit from ten on
_HASH = np.uint64(0x9E3779B97F4A7C15)
_ZERO = np.uint8(ord("0"))
_TABLE_BITS = 12
_TENS = 10 ** np.arange(17, dtype=np.int64)


class Unusual(Exception):
    """A field that cannot be read this way; the plain reader can."""


def _u(value: int) -> np.uint64:
    return np.uint64(value)


class ByteFields:
    """One chunk of text. `words[i]` are the eight bytes from i on, as one little-endian number."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.bytes = np.frombuffer(data + bytes(_PAD), np.uint8)
        shape = (len(data) + _PAD - 8,)
        self.words: Words = np.ndarray(shape, "<u8", buffer=self.bytes.data, strides=(1,))

    def places_of(self, char: bytes) -> Places:
        return np.flatnonzero(self.bytes == char[0])

    def ints(self, at: Places) -> tuple[NDArray[np.int64], Places]:
        """Whole numbers without a sign."""
        values, sizes = self._short_ints(at)
        long = np.flatnonzero(sizes == 8)
        if len(long):
            more, num = self._short_ints(at[long] + 8)
            if (num == 8).any():
                raise Unusual("a number of 16 digits or more")
            values[long] = values[long] * _TENS[num] + more
            sizes[long] += num
        if not sizes.all():
            raise Unusual("no number")
        return values, at + sizes

    def small_ints(self, at: Places) -> tuple[NDArray[np.int64], Places]:
        """The same, where nearly always one digit is all there is."""
        values = self.bytes[at] - _ZERO
        if (values > 9).any() or (self.bytes[at + 1] - _ZERO <= 9).any():
            return self.ints(at)
        return values.astype(np.int64), at + 1

    def ends(self, at: Places) -> Places:
        """The places behind whole numbers that nobody asks for."""
        sizes = _num_digits(self.words[at] ^ _DIGITS).view(np.int64)
        if not sizes.all() or (sizes == 64).any():
            return self.ints(at)[1]
        return at + (sizes >> 3)

    def _short_ints(self, at: Places) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first eight digits at most, and how many they are. Added up in pairs, then fours."""
        word = self.words[at] ^ _DIGITS
        bits = _num_digits(word)
        word <<= _u(64) - bits  # by 64 where there is no digit, which leaves 0
        word = (word * _u(10) + (word >> _u(8))) & _u(0x00FF00FF00FF00FF)
        word = (word * _u(100) + (word >> _u(16))) & _u(0x0000FFFF0000FFFF)
        word = (word * _u(10000) + (word >> _u(32))) & _u(0xFFFFFFFF)
        return word.view(np.int64), (bits >> _u(3)).view(np.int64)

    def seconds(self, at: Places) -> NDArray[np.float64]:
        """Times, to eight digits after the point. Short ones may have an exponent: read whole."""
        whole, after = self.ints(at)
        digits, num = self._short_ints(after + 1)
        values = whole + digits / _TENS[num]
        small = np.flatnonzero((whole < 10) | (self.bytes[after] != ord(".")) | (num == 0))
        if len(small):
            values[small] = self.floats(at[small])[0]
        return values

    def few_floats(self, at: Places, end: bytes) -> tuple[NDArray[np.float64], Places]:
        """Numbers up to `end`, of which many are alike (rewards): each is read once."""
        texts, codes, after = self.texts(at, end)
        return np.array([*map(float, texts), 0.0])[codes], after

    def floats(self, at: Places) -> tuple[NDArray[np.float64], Places]:
        """Numbers as JSON writes them, up to a comma or a closing brace."""
        if not len(at):
            return np.empty(0), at
        chars = self.bytes[at[:, None] + np.arange(FLOAT_CHARS_MAX)]
        ends = (chars == ord(",")) | (chars == ord("}"))
        sizes = ends.argmax(axis=1)
        if not ends[np.arange(len(at)), sizes].all():
            raise Unusual("a number without an end")
        chars[np.arange(FLOAT_CHARS_MAX) >= sizes[:, None]] = 0
        return chars.view(f"S{FLOAT_CHARS_MAX}").ravel().astype(np.float64), at + sizes

    def texts(self, at: Places, end: bytes) -> tuple[list[str], NDArray[np.int64], Places]:
        """Characters up to `end`: the different texts, which of them each is, and the ends."""
        mark = _ONES * _u(end[0])
        keys, bits = _hashed(self.words[at], mark)
        after = at + (bits >> _u(3)).view(np.int64)
        rest = np.flatnonzero(bits == 64)
        for _ in range(TEXT_WORDS_MAX):
            if not len(rest):
                break
            more, bits = _hashed(self.words[after[rest]], mark)
            keys[rest] = keys[rest] * _HASH + more
            after[rest] += (bits >> _u(3)).view(np.int64)
            rest = rest[bits == 64]
        else:
            raise Unusual("a text without an end")
        if (self.bytes[after - 1] == ord("\\")).any():
            raise Unusual("a quotation mark within a text")
        first, codes = _different(keys)
        raw = [self.data[at[i] : after[i]].decode() for i in first]
        texts = [json.loads(f'"{text}"') if "\\" in text else text for text in raw]
        return texts, codes, after


def _first_mark(marks: Words) -> Words:
    """Eight times the place of the first byte with its high bit set; 64 if none has it."""
    marks &= ~marks + _u(1)
    return np.bitwise_count(marks - _u(1)).astype(np.uint64) & _u(0x78)


def _num_digits(word: Words) -> Words:
    """Eight times the number of digits that a word begins with; its `0` are zero bytes."""
    return _first_mark(((word + _UP_TO_NINE) | word) & _HIGH)


def _hashed(word: Words, mark: np.uint64) -> tuple[Words, Words]:
    """A number for what stands before the mark in each word, and eight times its size."""
    other = word ^ mark
    bits = _first_mark((other - _ONES) & ~other & _HIGH)
    shift = _u(64) - bits
    return ((word << shift) ^ bits) * _HASH, bits


def _different(keys: Words) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A place of each different key, and for each key which of these it is.

    Few keys differ, so a small table mostly has room for each; if two meet there, they are sorted.
    """
    slot = (keys >> _u(64 - _TABLE_BITS)).view(np.int64)
    table = np.full(1 << _TABLE_BITS, -1, np.int64)
    table[slot] = np.arange(len(keys))
    if (keys[table[slot]] != keys).any():
        _, first, codes = np.unique(keys, return_index=True, return_inverse=True)
        return first, codes.astype(np.int64)
    used = np.flatnonzero(table >= 0)
    first = table[used]
    table[used] = np.arange(len(used))
    return first, table[slot]
