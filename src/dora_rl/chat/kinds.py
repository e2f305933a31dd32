"""What a value of a request may be: the kinds that the table of bounds is made of.

Never looks at a model. Invariant: what `read` returns is within its kind, however wild the value
was; a refusal says what it may be, and repeats no text of the client's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
TEXT_CHARS_MAX = 16 << 20  # the body has a limit of its own


class Unfit(Exception):
    """A value is not what its place may hold: where inside the field, and what it must be."""

    def __init__(self, text: str, where: str = "", found: str = "") -> None:
        super().__init__(text)
        self.text, self.where, self.found = text, where, found


class Kind(Protocol):
    """What a value may be. `text` continues the sentence "it must be …"."""

    @property
    def text(self) -> str: ...
    def read(self, value: object) -> Any:
        """The value, in the form the rest of the code expects; raises `Unfit`."""
        ...


def unfit(kind: Kind, value: object) -> Unfit:
    return Unfit(kind.text, found=shown(value))


def shown(value: object) -> str:
    """A number as it is, if it is short; how long a string is; of anything else its kind alone."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        text = repr(value)
        return text if len(text) <= 24 else f"a number of {len(text)} digits"
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    return {list: "a list", dict: "an object"}.get(type(value), "something else")


@dataclass(frozen=True, slots=True)
class Flag:
    text = "true or false"

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise unfit(self, value)
        return value


@dataclass(frozen=True, slots=True)
class Whole:
    least: int
    most: int

    @property
    def text(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def read(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise unfit(self, value)
        if not self.least <= value <= self.most:
            raise unfit(self, value)
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """Finite. `or_zero`: 0 too, below `least`."""

    least: float
    most: float
    or_zero: bool = False

    @property
    def text(self) -> str:
        return f"{'0, or ' * self.or_zero}a number from {self.least:g} to {self.most:g}"

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise unfit(self, value)
        if not self.least <= value <= self.most and not (self.or_zero and value == 0):
            raise unfit(self, value)  # nan is not within anything
        return float(value)


@dataclass(frozen=True, slots=True)
class Text:
    """Whole characters: half of a surrogate pair cannot be written down in UTF-8."""

    least: int
    most: int = TEXT_CHARS_MAX

    @property
    def text(self) -> str:
        return f"a string of {self.least} to {self.most} characters"

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not self.least <= len(value) <= self.most:
            raise unfit(self, value)
        if not is_unicode(value):
            raise Unfit("a string of whole Unicode characters", found="half a surrogate pair")
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few values, each as JSON writes it in `text`."""

    values: tuple[object, ...]
    text: str

    def read(self, value: object) -> Any:
        for known in self.values:
            if type(value) is type(known) and value == known:
                return known
        if isinstance(value, str) and any(isinstance(known, str) for known in self.values):
            raise Unfit(self.text, found="another string")
        raise unfit(self, value)


@dataclass(frozen=True, slots=True)
class ListOf:
    kind: Kind
    least: int
    most: int
    words: str  # what the entries are

    @property
    def text(self) -> str:
        return f"a list of {self.least} to {self.most} {self.words}"

    def read(self, value: object) -> list[Any]:
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            raise unfit(self, value)
        read: list[Any] = []
        for index, entry in enumerate(value):
            try:
                read.append(self.kind.read(entry))
            except Unfit as error:
                raise Unfit(error.text, f"[{index}]{error.where}", error.found) from None
        return read


@dataclass(frozen=True, slots=True)
class TokenIds:
    """As `ListOf(Whole(0, INT32_MAX), 1, most)`, for millions of them."""

    most: int

    @property
    def text(self) -> str:
        return f"a list of 1 to {self.most} token ids of the vocabulary"

    def read(self, value: object) -> list[int]:
        if not isinstance(value, list) or not 1 <= len(value) <= self.most:
            raise unfit(self, value)
        if set(map(type, value)) != {int} or min(value) < 0 or max(value) > INT32_MAX:
            raise Unfit(self.text, found="a list with something else in it")
        return value


@dataclass(frozen=True, slots=True)
class Either:
    kinds: tuple[Kind, ...]

    @property
    def text(self) -> str:
        return ", or ".join(kind.text for kind in self.kinds)

    def read(self, value: object) -> Any:
        inner: Unfit | None = None
        for kind in self.kinds:
            try:
                return kind.read(value)
            except Unfit as error:
                deep = error.where or (isinstance(kind, Text) and isinstance(value, str))
                inner = error if deep and inner is None else inner
        raise inner or unfit(self, value)


@dataclass(frozen=True, slots=True)
class Record:
    """An object; what it does not know it leaves out, and so does null. `needed` must be there."""

    fields: tuple[tuple[str, Kind], ...]
    needed: tuple[str, ...] = ()
    words: str = "an object"

    @property
    def text(self) -> str:
        return self.words

    def read(self, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise unfit(self, value)
        read: dict[str, Any] = {}
        for name, kind in self.fields:
            given = value.get(name)
            if given is None and name not in self.needed:
                continue
            try:
                read[name] = kind.read(given)
            except Unfit as error:
                raise Unfit(error.text, f".{name}{error.where}", error.found) from None
        return read


@dataclass(frozen=True, slots=True)
class Json:
    """Any object, as deep and as large as it may be; keys and strings count by their characters."""

    depth: int
    values: int
    chars: int
    keys_not: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        but = f", without {', '.join(sorted(self.keys_not))}" if self.keys_not else ""
        return (
            f"an object of at most {self.depth} levels, {self.values} values and "
            f"{self.chars} characters{but}"
        )

    def read(self, value: object) -> dict[str, Any]:
        if not isinstance(value, dict) or self.keys_not & value.keys():
            raise unfit(self, value)
        level: list[object] = [value]
        num_values = num_chars = 0
        for _ in range(self.depth + 1):
            inner: list[object] = []
            for entry in level:
                num_values += 1
                if isinstance(entry, dict):
                    num_chars += sum(map(len, entry))
                    inner += entry.values()
                    fits = all(map(is_unicode, entry))
                elif isinstance(entry, list):
                    inner += entry
                    fits = True
                else:
                    num_chars += len(entry) if isinstance(entry, str) else 0
                    fits = is_plain(entry)
                if not fits or num_values > self.values or num_chars > self.chars:
                    raise unfit(self, value)
            level = inner
            if not level:
                return value
        raise unfit(self, value)


@dataclass(frozen=True, slots=True)
class Shaped:
    """Kept as it was written, within `json`; what code looks at is as `record` says."""

    json: Json
    record: Record

    @property
    def text(self) -> str:
        return f"{self.record.text}; {self.json.text}"

    def read(self, value: object) -> dict[str, Any]:
        self.record.read(value)
        return self.json.read(value)


def is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_plain(value: object) -> bool:
    """A number that others can hold too, a whole string, true, false or null."""
    if isinstance(value, str):
        return is_unicode(value)
    if isinstance(value, float):
        return abs(value) <= 1e300  # neither infinite nor nan
    return value is None or (isinstance(value, int) and -INT64_MAX <= value <= INT64_MAX)
