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

    def _short_ints(self, at: Places) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first eight digits at most, and how many they are. Added up in pairs, then fours."""
        word = self.words[at] ^ _DIGITS
        num = _index_of_first(((word + _UP_TO_NINE) | word) & _HIGH)
        word = np.where(num > 0, word << ((_u(8) - num) << _u(3)), _u(0))
        word = (word * _u(10) + (word >> _u(8))) & _u(0x00FF00FF00FF00FF)
        word = (word * _u(100) + (word >> _u(16))) & _u(0x0000FFFF0000FFFF)
        word = (word * _u(10000) + (word >> _u(32))) & _u(0xFFFFFFFF)
        return word.astype(np.int64), num.astype(np.int64)

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
        keys, after = np.zeros(len(at), np.uint64), at.copy()
        rest, mark = np.arange(len(at)), _ONES * _u(end[0])
        for _ in range(TEXT_WORDS_MAX):
            word = self.words[after[rest]]
            other = word ^ mark
            num = _index_of_first((other - _ONES) & ~other & _HIGH)
            keep = np.where(num > 0, ~_u(0) >> ((_u(8) - num) << _u(3)), _u(0))
            keys[rest] = (keys[rest] ^ (word & keep)) * _HASH + num
            after[rest] += num.astype(np.int64)
            rest = rest[num == 8]
            if not len(rest):
                break
        else:
            raise Unusual("a text without an end")
        if (self.bytes[after - 1] == ord("\\")).any():
            raise Unusual("a quotation mark within a text")
        _, first, codes = np.unique(keys, return_index=True, return_inverse=True)
        raw = [self.data[at[i] : after[i]].decode() for i in first]
        texts = [json.loads(f'"{text}"') if "\\" in text else text for text in raw]
        return texts, codes.astype(np.int64), after


def _index_of_first(marks: Words) -> Words:
    """Which byte of each word is the first with its high bit set; 8 if none is."""
    lowest = marks & (~marks + _u(1))
    return np.bitwise_count(lowest - _u(1)).astype(np.uint64) >> _u(3)
