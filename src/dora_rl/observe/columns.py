"""A stretch of the event log as columns: what happened often as arrays, the rest as values.

A run of 100,000 groups has millions of lines, and a picture needs a few numbers of each. The
frequent events and actions (`FREQUENT`) become one array per field; msgspec reads just these fields
and passes over the rest of a line. Rare ones are decoded as they are. What no picture needs is left
out, and checksums are not looked at: proving is `audit`'s part.

`LogTail` follows a log as it grows: every byte is read once, and whole lines only; what a writer
has not finished waits for the next look. Never writes, never blocks the run it watches.

Segments of a long log are read by other processes, which `segments` starts: `main` sends one
`Columns` for each path. A reader that dies (killed for its memory, say) is an error that names its
segment; nothing is passed over.
"""

from __future__ import annotations

import gc
import sys
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.io.codec import decode, encode, loads, pack_arrays, tags_of, unpack_arrays
from dora_rl.observe.segments import SegmentReaders, segments, start_readers
from dora_rl.types import UserError

Table: TypeAlias = dict[str, NDArray[Any]]
Kind: TypeAlias = type

# Each with the fields that are wanted. A request becomes `group` and `sample`; `at` is added.
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
    ev.LearnerReport,
    ev.Tick,
    ev.BatchAccepted,
    ev.Continued,
    act.Score,
    act.Unload,
    act.Move,
    act.RetireVersion,
}
_KINDS: dict[str, Kind] = {
    tag: kind
    for kind in (*typing.get_args(ev.Event), *typing.get_args(act.Action))
    for tag in tags_of(kind)
}
# How a field is read; others are whole numbers.
_READ_AS: dict[str, Any] = {
    "request": tuple[int, int],
    "samples": list[int],
    "reward": float | None,  # None: no number
    "step": int | None,
    "segments": list[msgspec.Raw],  # how many there are is all that is asked for
} | dict.fromkeys(("instance", "src", "dst", "finish", "end", "reason"), str)


def _lean(tag: str) -> type[msgspec.Struct]:
    """What msgspec reads of a kind. Nothing but its name, where it has no table."""
    fields = [(name, _READ_AS.get(name, int)) for name in FREQUENT.get(_KINDS[tag], ())]
    return msgspec.defstruct(tag, fields, tag_field="is", tag=tag, gc=False)


_LEAN = {tag: _lean(tag) for tag in _KINDS}
_RARE_CODE, _LEFT_OUT_CODE = -1, -2
_FREQUENT = {kind: code for code, kind in enumerate(FREQUENT)}
_CODES = {
    lean: _FREQUENT.get(_KINDS[tag], _LEFT_OUT_CODE if _KINDS[tag] in LEFT_OUT else _RARE_CODE)
    for tag, lean in _LEAN.items()
}


def _line_decoder() -> msgspec.json.Decoder[Any]:
    event, action = (
        typing.Union[  # noqa: UP007
            tuple(_LEAN[tag] for kind in typing.get_args(kinds) for tag in tags_of(kind))
        ]
        for kinds in (ev.Event, act.Action)
    )
    fields = [("t", float), ("e", event), ("a", list[action])]
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields, gc=False))


_LINE = _line_decoder()
_CRC_CHARS = 9
_LINES_AT_ONCE = 1000  # whose objects stay in the processor's cache until they are columns


class Rare(NamedTuple):
    """An event or action as a value; `at` is its place among all of them."""

    at: int
    value: Any


@dataclass(frozen=True, slots=True)
class Columns:
    """Whole lines of one segment: their events and actions, numbered in the order of the log.

    `tables[Scored]["reward"][i]`, `["group"][i]` and `["sample"][i]` belong together; `["at"][i]`
    is the number of this event, and `times[at]` when it happened. A text is a code into `texts`.
    """

    tables: dict[Kind, Table]
    rare: list[Rare]
    texts: list[str]
    times: NDArray[np.float64]
    num_lines: int


def columns(data: bytes) -> Columns:
    """Read whole lines of the log; a snapshot at their beginning is passed over."""
    if b',"s":{' in data[:64]:  # only the first line can be a snapshot
        data = data[data.index(b"\n") + 1 :]
    text = np.frombuffer(data, np.uint8).copy()
    ends = np.flatnonzero(text == ord("\n")) + 1
    begins = np.append(0, ends)[:-1]
    text[begins[:, None] + np.arange(_CRC_CHARS)] = ord(" ")  # what is left is lines of JSON
    data = text.tobytes()
    texts: defaultdict[str, int] = defaultdict()
    texts.default_factory = texts.__len__  # a new text gets the next number
    tables = {kind: [_table(kind, np.zeros(0, np.int64), [], texts)] for kind in FREQUENT}
    rare: list[Rare] = []
    times, num_objects = [np.zeros(0)], 0
    for first in range(0, len(ends), _LINES_AT_ONCE):
        lines = slice(first, first + _LINES_AT_ONCE)
        records = _records(data[begins[lines][0] : ends[lines][-1]])
        objects = [value for record in records for value in (record.e, *record.a)]
        codes = np.fromiter(map(_CODES.__getitem__, map(type, objects)), np.int8, len(objects))
        for code, kind in enumerate(FREQUENT):
            places = np.flatnonzero(codes == code)
            tables[kind].append(
                _table(
                    kind, num_objects + places, [objects[place] for place in places.tolist()], texts
                )
            )
        line_of = np.repeat(np.arange(len(records)), [1 + len(record.a) for record in records])
        for line in np.unique(line_of[codes == _RARE_CODE]).tolist():
            record = loads(data[begins[first + line] : ends[first + line]])
            at = int(np.searchsorted(line_of, line))
            for place, value in enumerate([record["e"], *record["a"]], start=at):
                if codes[place] == _RARE_CODE:
                    value = decode(_KINDS[value["is"]], value)
                    rare.append(Rare(num_objects + place, value))
        times.append(np.array([record.t for record in records])[line_of])
        num_objects += len(objects)
    return Columns(
        {kind: joined_tables(parts) for kind, parts in tables.items()},
        rare,
        list(texts),
        np.concatenate(times),
        len(ends),
    )


def _records(lines: bytes) -> list[Any]:
    try:
        return _LINE.decode_lines(lines)
    except msgspec.DecodeError:  # a reward that is no number, say: msgspec writes null for it
        return [_LINE.decode(msgspec.json.encode(loads(line))) for line in lines.splitlines()]


def _table(kind: Kind, at: NDArray[Any], rows: list[Any], texts: dict[str, int]) -> Table:
    table, num = {"at": at}, len(rows)
    for name in FREQUENT[kind]:
        values = map(attrgetter(name), rows)
        if name == "request":
            pairs = np.fromiter(chain.from_iterable(values), np.int64, 2 * num)
            table["group"], table["sample"] = pairs[::2], pairs[1::2]
        elif name == "samples":  # a row for each of them
            lists = list(values)
            which = np.repeat(np.arange(num), np.array([len(one) for one in lists], np.int64))
            table = rows_of(table, which)
            table["sample"] = np.fromiter(chain.from_iterable(lists), np.int64, len(which))
        elif name == "reward":
            table[name] = np.array(list(values), np.float64)  # None becomes nan
        elif name == "step":
            table[name] = np.array([-1 if value is None else value for value in values], np.int64)
        elif name == "segments":
            table[name] = np.fromiter(map(len, values), np.int64, num)
        elif _READ_AS.get(name) is str:
            table[name] = np.fromiter(map(texts.__getitem__, values), np.int64, num)
        else:
            table[name] = np.fromiter(values, np.int64, num)
    return table


def rows_of(table: Table, chosen: Any) -> Table:
    """Those rows of each column that `chosen` (places, a mask or a slice) names."""
    return {name: column[chosen] for name, column in table.items()}


def joined_tables(parts: list[Table]) -> Table:
    """The rows of all parts, with the columns of the first."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# -- tables that grow ------------------------------------------------------------------------------


class Growing:
    """Equally long columns. `table["name"]` is a view of the rows in use; write through it."""

    def __init__(self, **fills: tuple[str, float]) -> None:
        self._fills = fills
        self._columns: dict[str, NDArray[Any]] = {
            name: np.full(1024, fill, dtype) for name, (dtype, fill) in fills.items()
        }
        self.size = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._columns[name][: self.size]

    def reach(self, size: int) -> None:
        """Have at least so many rows; new ones hold the columns' fill values."""
        room = len(next(iter(self._columns.values())))
        if size > room:
            more = max(size, 2 * room) - room
            for name, (dtype, fill) in self._fills.items():
                self._columns[name] = np.concatenate(
                    [self._columns[name], np.full(more, fill, dtype)]
                )
        self.size = max(size, self.size)

    def extend(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Add rows; of a table with more columns ours are taken."""
        begin = self.size
        self.reach(begin + len(next(iter(rows.values()))))
        for name in self._fills:
            self[name][begin:] = rows[name]


# -- by other processes ----------------------------------------------------------------------------


_LENGTH_BYTES = 8


def read_segments(readers: SegmentReaders) -> Iterator[Columns]:
    """The columns of whole segments, in order."""
    try:
        for place, path in enumerate(readers.paths):
            stream = readers.streams[place % len(readers.streams)]
            size = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            data = stream.read(size)
            if not data or len(data) < size:
                raise UserError(f"{path} could not be read: its reader has ended")
            yield _unpacked(data)
    finally:
        readers.close()


def main() -> None:
    """A reader: the columns of each file that the command names, each after its length."""
    gc.disable()  # nothing lives longer than an answer
    for path in sys.argv[1:]:
        data = _packed(columns(Path(path).read_bytes()))
        sys.stdout.buffer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
        sys.stdout.buffer.flush()


def _packed(found: Columns) -> bytes:
    rare = [[at, type(value).__name__, encode(type(value), value)] for at, value in found.rare]
    header = {"rare": rare, "texts": found.texts, "num_lines": found.num_lines}
    arrays = {f"{k.__name__}.{n}": a for k, t in found.tables.items() for n, a in t.items()}
    return pack_arrays(header, arrays | {"times": found.times})


def _unpacked(data: bytes) -> Columns:
    header, arrays = unpack_arrays(data)
    rare = [Rare(at, decode(_KINDS[name], value)) for at, name, value in header["rare"]]
    times, tables = arrays.pop("times"), {kind: Table() for kind in FREQUENT}
    for name, array in arrays.items():
        kind, _, column = name.partition(".")
        tables[_KINDS[kind]][column] = array
    return Columns(tables, rare, header["texts"], times, header["num_lines"])


# -- as the log grows ------------------------------------------------------------------------------


CHUNK_BYTES = 8 << 20


class LogTail:
    """Where we are in a folder of segments. `readers` may have been started before."""

    def __init__(self, folder: Path, readers: SegmentReaders | None = None) -> None:
        self._folder = folder
        self._readers = readers
        self._path: Path | None = None
        self._offset = 0
        self.num_bytes = 0  # read so far

    def columns(self) -> Iterator[Columns]:
        """New lines, in order; at first the closed segments of a long log on several cores."""
        if self._path is None:
            readers, self._readers = self._readers or start_readers(self._folder), None
            if readers is not None:
                for path, found in zip(readers.paths, read_segments(readers), strict=True):
                    self._path, self._offset = path, path.stat().st_size
                    self.num_bytes += self._offset
                    yield found
        for chunk in self.chunks():
            yield columns(chunk)

    def chunks(self) -> Iterator[bytes]:
        """Whole lines that were not read before, in the order of the log."""
        paths = segments(self._folder)
        if not paths:
            raise UserError(f"{self._folder} holds no event log")
        for path in paths:
            if self._path is not None and path < self._path:
                continue
            if path != self._path:
                self._path, self._offset = path, 0
            yield from self._rest(path)

    def _rest(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            while True:
                file.seek(self._offset)
                data = file.read(CHUNK_BYTES)
                end = data.rfind(b"\n") + 1
                if not end and len(data) == CHUNK_BYTES:  # a snapshot can be longer than a chunk
                    data += file.readline()
                    end = len(data) if data.endswith(b"\n") else 0
                if not end:
                    return
                self._offset += end
                self.num_bytes += end
                yield data[:end]
