"""A stretch of the event log as columns: what happened often as arrays, the rest as values.

A run of 100,000 groups has millions of lines; decoding each takes minutes, and a picture needs a
few numbers of each. The frequent events and actions (`FREQUENT`) become one array per field, read
by `byte_fields`; their layout follows from the dataclasses, as in `core.codec`. Rare ones are
decoded as they are. What no picture needs is left out, and checksums are not looked at: proving
is `audit`'s part. `plain_columns` reads the same one line after the other; it is what `columns`
is tested against, and what it falls back to where a field is unusual.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.codec import decoder
from dora_rl.observe.byte_fields import ByteFields, Places, Unusual
from dora_rl.types import RequestId, Segment

Table: TypeAlias = dict[str, NDArray[Any]]
Kind: TypeAlias = type

# Each with its fields up to the last one wanted. `at` and `now` are added to every table.
FREQUENT: dict[Kind, tuple[str, ...]] = {
    ev.SampleFinished: ("request", "instance", "num_tokens", "finish", "segments"),
    ev.Scored: ("request", "reward"),
    ev.Moved: ("request", "src", "dst", "num_bytes", "num_tokens"),
    act.IssueGroup: ("group", "prompt", "version", "step"),
    act.Dispatch: ("instance", "group", "version", "samples"),
    act.Feed: ("step", "group"),
    act.EndGroup: ("group", "version", "end", "step", "reason"),
    act.Park: ("instance", "request"),
}
LEFT_OUT = {
    ev.InstanceReport,
    ev.TrainerReport,
    ev.Tick,
    ev.BatchAccepted,
    ev.Continued,
    act.Score,
    act.Unload,
    act.Move,
    act.RetireVersion,
}
_EVENTS = typing.get_args(ev.Event)
_ACTIONS = typing.get_args(act.Action)
_DECODE = {kind.__name__: decoder(kind) for kind in (*_EVENTS, *_ACTIONS)}
_RARE = {k.__name__ for k in (*_EVENTS, *_ACTIONS)} - {k.__name__ for k in (*FREQUENT, *LEFT_OUT)}
_MARK, _LINE = b'{"is":"', b'{"n":'
_CRC_CHARS = 9
_WORD_MARK, _WORD_LINE = (np.uint64(int.from_bytes(text, "little")) for text in (_MARK, _LINE))
_MASK_MARK, _MASK_LINE = (np.uint64((1 << (8 * len(text))) - 1) for text in (_MARK, _LINE))


class Rare(NamedTuple):
    """An event or action as a value; `at` orders it among the rows of the tables.

    `before` is the time of the line before its own, nan for the first line of a chunk.
    """

    at: int
    now: float
    before: float
    value: Any


@dataclass(frozen=True, slots=True)
class Columns:
    """Whole lines of one segment. A text field is a code into `texts`.

    `tables[Scored]["reward"][i]`, `["group"][i]` and `["sample"][i]` belong together; rows of
    different tables are put in order by `at`, their place in the chunk.
    """

    tables: dict[Kind, Table]
    rare: list[Rare]
    texts: list[str]
    now_first: float
    now_last: float
    num_lines: int


def columns(data: bytes) -> Columns:
    """Read whole lines of the log; snapshots among them are passed over."""
    return decoded(raw_columns(data))


def raw_columns(data: bytes) -> Columns:
    """The same with rare values as text, as the log has them, for sending on."""
    try:
        return _Reader(data).read()
    except Unusual:
        return _plain(data)


def decoded(found: Columns) -> Columns:
    values = json.loads(f"[{','.join(rare.value for rare in found.rare)}]")
    rows = zip(found.rare, values, strict=True)
    return replace(found, rare=[rare._replace(value=value_of(value)) for rare, value in rows])


def value_of(data: dict[str, Any]) -> Any:
    """An event or action."""
    return _DECODE[data["is"]](data)


def vector_columns(data: bytes) -> Columns:
    """By whole arrays, or `Unusual`."""
    return decoded(_Reader(data).read())


def plain_columns(data: bytes) -> Columns:
    """By decoding every line."""
    return decoded(_plain(data))


def names_of(kind: Kind) -> list[str]:
    """The columns that a frequent kind has, apart from `at` and `now`."""
    names: list[str] = []
    for name in FREQUENT[kind]:
        names += ["group", "sample"] if name == "request" else [name]
    return names


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.fields = ByteFields(data)
        self.texts: dict[str, int] = {}

    def read(self) -> Columns:
        starts, places, kinds, lines = self._objects()
        self.times = self.fields.seconds(self._ends_of_numbers(starts) + len(',"t":'))
        rest, tables = np.arange(len(places)), dict[Kind, Table]()
        for kind, code in _KNOWN.items():
            mine = kinds[rest] == code
            if kind in FREQUENT:
                tables[kind] = self._table(kind, places[rest[mine]])
                tables[kind]["now"] = self.times[lines[rest[mine]]]
            rest = rest[~mine]
        tables = {kind: tables[kind] for kind in FREQUENT}
        rare = self._rare(places[rest], lines[rest])
        first, last = (float(t) for t in self.times[[0, -1]]) if len(starts) else (0.0, 0.0)
        return Columns(tables, rare, list(self.texts), first, last, len(starts))

    def _objects(self) -> tuple[Places, Places, NDArray[np.uint64], Places]:
        """Where entries begin; where events and actions do, of which kind, in which entry.

        No brace within a text can be taken for one of them: its quotation marks are escaped. A
        snapshot, which may only come first, is no entry.
        """
        fields = self.fields
        places = fields.places_of(b"{")
        words = fields.words[places]
        begins = (words & _MASK_LINE) == _WORD_LINE
        starts, lines = places[begins] - _CRC_CHARS, np.cumsum(begins) - 1
        objects = (words & _MASK_MARK) == _WORD_MARK
        if len(starts) and b'"s":{' in self.data[:64]:
            starts, lines = starts[1:], lines - 1
            objects &= lines >= 0
        places, lines = places[objects], lines[objects]
        kinds = fields.words[places + len(_MARK)]
        instance = np.flatnonzero(kinds == _INSTANCE)  # it reports, it joined or it is lost
        kinds[instance[fields.bytes[places[instance] + 15] == ord("R")]] = _KNOWN[ev.Tick]
        return starts, places, kinds, lines

    def _ends_of_numbers(self, starts: Places) -> Places:
        return self.fields.ends(starts + len('00000000 {"n":'))

    def _table(self, kind: Kind, at: Places) -> Table:
        table = Table(at=at)
        place = at + len(_MARK) + len(kind.__name__) + 1
        for name, hint in _LAYOUTS[kind]:
            place = place + len(f',"{name}":')
            if hint is int and name not in FREQUENT[kind]:
                place = self.fields.ends(place)
            else:
                place = self._field(table, name, hint, place)
        return {name: table[name] for name in ("at", *names_of(kind))}

    def _field(self, table: Table, name: str, hint: Any, at: Places) -> Places:
        """Read one field into the table; returns the places behind it."""
        if hint is RequestId:
            table["group"], after = self.fields.ints(at + 1)
            table["sample"], after = self.fields.small_ints(after + 1)
            return after + 1
        if hint is float:  # last of its kind
            table[name], after = self.fields.few_floats(at, b"}")
            return after
        if hint == int | None:
            return self._maybe(table, name, at)
        if hint is int:
            table[name], after = self.fields.ints(at)
            return after
        if hint == tuple[Segment, ...]:  # last of its kind: how many is all that is asked
            after = self.fields.ends(self.fields.ends(at + 2) + 1)
            table[name] = np.where(self.fields.bytes[after + 1] == ord(","), 2, 1)
            return after
        if hint == tuple[int, ...]:
            table[name], after = self._codes(at + 1, b"]")
            return after + 1
        assert hint is str or issubclass(hint, Enum), f"no column for {hint}"
        table[name], after = self._codes(at + 1, b'"')
        return after + 1

    def _maybe(self, table: Table, name: str, at: Places) -> Places:
        values, after = np.full(len(at), -1, np.int64), at + len("null")
        there = self.fields.bytes[at] != ord("n")
        values[there], after[there] = self.fields.ints(at[there])
        table[name] = values
        return after

    def _codes(self, at: Places, end: bytes) -> tuple[NDArray[np.int64], Places]:
        texts, codes, after = self.fields.texts(at, end)
        table = np.array([self.texts.setdefault(t, len(self.texts)) for t in texts], np.int64)
        return (table[codes] if len(codes) else codes), after

    def _rare(self, places: Places, lines: Places) -> list[Rare]:
        before = np.append(self.times, np.nan)[lines - 1]  # of the first line: the nan at the end
        rows = zip(places.tolist(), self.times[lines].tolist(), before.tolist(), strict=True)
        found = [Rare(at, now, last, self._object(at)) for at, now, last in rows]
        return [rare for rare in found if _name_in(rare.value) in _RARE]

    def _object(self, at: int) -> str:
        """The text of one object. Nearly all are flat: they end at the first closing brace."""
        text = self.data[at : self.data.index(b"}", at) + 1]
        if text.count(b"{") == 1 and text.count(b'"') % 2 == 0 and b"\\" not in text:
            return text.decode()
        line = self.data[at : self.data.index(b"\n", at)].decode()
        return line[: json.JSONDecoder().raw_decode(line)[1]]


def _name_in(text: str) -> str:
    begin = len(_MARK)
    return text[begin : text.index('"', begin)]


def _code(kind: Kind) -> np.uint64:
    """The first eight bytes after `{"is":"`."""
    fields = [field.name for field in dataclasses.fields(kind)]
    text = f'{kind.__name__}","{"".join(fields[:1])}'[:8]
    return np.uint64(int.from_bytes(text.encode(), "little"))


def _known() -> dict[Kind, np.uint64]:
    """Kinds that need no look: they have a table or are left out. Those of every line first."""
    often = (ev.SampleFinished, act.Score, ev.Scored)
    codes = {kind: _code(kind) for kind in (*often, *FREQUENT, *LEFT_OUT)}
    del codes[ev.InstanceReport]  # joined and lost begin with the same eight bytes
    return codes | {ev.Tick: np.uint64(int.from_bytes(b'Tick"},"', "little"))}


_INSTANCE = _code(ev.InstanceReport)
_KNOWN = _known()


def _layout(kind: Kind) -> list[tuple[str, Any]]:
    """Names and types of a kind's fields, up to the last one wanted."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return [(name, hints[name]) for name in names[: names.index(FREQUENT[kind][-1]) + 1]]


_LAYOUTS = {kind: _layout(kind) for kind in FREQUENT}


def _plain(data: bytes) -> Columns:
    texts: dict[str, int] = {}
    rows: dict[Kind, list[tuple[float, ...]]] = {kind: [] for kind in FREQUENT}
    rare: list[Rare] = []
    times: list[float] = []
    by_name = {kind.__name__: kind for kind in FREQUENT}
    at = 0
    for line in data.splitlines():
        record = json.loads(line[9:])
        objects = [record["e"], *record["a"]] if "e" in record else []
        before = times[-1] if times else float("nan")
        times += [record["t"]] if objects else []
        for value in objects:
            at += 1
            if value["is"] in by_name:
                kind = by_name[value["is"]]
                rows[kind].append((at, record["t"], *_plain_row(value, FREQUENT[kind], texts)))
            elif value["is"] in _RARE:
                rare.append(Rare(at, record["t"], before, json.dumps(value)))
    tables = {kind: _plain_table(kind, rows[kind]) for kind in FREQUENT}
    ends = (times[0], times[-1]) if times else (0.0, 0.0)
    return Columns(tables, rare, list(texts), *ends, len(times))


def _plain_row(value: dict[str, Any], names: tuple[str, ...], texts: dict[str, int]) -> list[float]:
    row: list[float] = []
    for name in names:
        item = value[name]
        if name == "request":
            row += item
        elif name == "segments":
            row.append(min(2, len(item)))
        elif isinstance(item, (str, list)):
            text = item if isinstance(item, str) else ",".join(map(str, item))
            row.append(texts.setdefault(text, len(texts)))
        else:
            row.append(-1 if item is None else item)
    return row


def _plain_table(kind: Kind, rows: list[tuple[float, ...]]) -> Table:
    parts = list(zip(*rows, strict=True)) or [()] * (2 + len(names_of(kind)))
    names = ["at", "now", *names_of(kind)]
    return {
        name: np.array(part, np.float64 if name in ("now", "reward") else np.int64)
        for name, part in zip(names, parts, strict=True)
    }
