"""A stretch of the event log as columns: what happened often as arrays, the rest as values.

A run of 100,000 groups has millions of lines, and a picture needs a few numbers of each. The
frequent events and actions (`FREQUENT`) become one array per field; msgspec reads just these fields
and passes over the rest of a line. Rare ones are decoded as they are. What no picture needs is left
out, and checksums are not looked at: proving is `audit`'s part.

`LogTail` follows a log as it grows: every byte is read once, and whole lines only; what a writer
has not finished waits for the next look. Never writes, never blocks the run it watches.

Segments of a long log are read by other processes, which `segments` starts. Each gets paths and
answers each with a message (`io.wire`): the rare values as the log has them, and the arrays, whole
numbers as short as they may be. A reader that dies (killed for its memory, say) is an error that
names its segment; nothing is passed over.

    python -m dora_rl.observe.columns FD FD < paths.json
"""

from __future__ import annotations

import gc
import json
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.io.arrays import pack_arrays, unpack_arrays
from dora_rl.io.codec import decode, loads
from dora_rl.observe.segments import SegmentReaders, segments, start_readers
from dora_rl.types import UserError

Table: TypeAlias = dict[str, NDArray[Any]]
Kind: TypeAlias = type

# Each with the fields that are wanted. `at` and `now` are added to every table.
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
_KINDS = {
    kind.__name__: kind for kind in (*typing.get_args(ev.Event), *typing.get_args(act.Action))
}
_RARE = _KINDS.keys() - {kind.__name__ for kind in (*FREQUENT, *LEFT_OUT)}
# How a field is read; others are whole numbers. Lists within stay text: how many there are, or
# which they are, is all that is asked for.
_READ_AS: dict[str, Any] = {
    "request": tuple[int, int],
    "reward": float | None,  # None: no number
    "step": int | None,
    "segments": list[msgspec.Raw],
    "samples": msgspec.Raw,
} | dict.fromkeys(("instance", "src", "dst", "finish", "end", "reason"), str)


def _lean(kind: Kind) -> type[msgspec.Struct]:
    """What msgspec reads of a kind. Nothing but its name, where it has no table."""
    fields = [(name, _READ_AS.get(name, int)) for name in FREQUENT.get(kind, ())]
    return msgspec.defstruct(kind.__name__, fields, tag_field="is", tag=kind.__name__, gc=False)


_LEAN = {kind: _lean(kind) for kind in _KINDS.values()}
_RARE_CODE, _LEFT_OUT_CODE = -1, -2
_FREQUENT = {kind: code for code, kind in enumerate(FREQUENT)}
_CODES = {
    lean: _RARE_CODE if kind.__name__ in _RARE else _FREQUENT.get(kind, _LEFT_OUT_CODE)
    for kind, lean in _LEAN.items()
}


def _line_decoder() -> msgspec.json.Decoder[Any]:
    event, action = (
        typing.Union[tuple(_LEAN[kind] for kind in typing.get_args(kinds))]  # noqa: UP007
        for kinds in (ev.Event, act.Action)
    )
    fields = [("t", float), ("e", event), ("a", list[action])]
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields, gc=False))


_LINE = _line_decoder()
_CRC_CHARS = 9
_LINES_AT_ONCE = 1000  # whose objects stay in the processor's cache until they are columns


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
    found = raw_columns(data)
    return replace(found, rare=[rare._replace(value=value_of(rare.value)) for rare in found.rare])


def value_of(data: dict[str, Any]) -> Any:
    """An event or action."""
    return decode(_KINDS[data["is"]], data)


def names_of(kind: Kind) -> list[str]:
    """The columns that a frequent kind has, apart from `at` and `now`."""
    names: list[str] = []
    for name in FREQUENT[kind]:
        names += ["group", "sample"] if name == "request" else [name]
    return names


def raw_columns(data: bytes) -> Columns:
    """The same with rare values as plain ones, as the log has them, for sending on."""
    if b',"s":{' in data[:64]:  # only the first line can be a snapshot
        data = data[data.index(b"\n") + 1 :]
    text = np.frombuffer(data, np.uint8).copy()
    ends = np.flatnonzero(text == ord("\n")) + 1
    begins = np.append(0, ends)[:-1]
    text[begins[:, None] + np.arange(_CRC_CHARS)] = ord(" ")  # what is left is lines of JSON
    reader = _Reader(text.tobytes(), begins, ends)
    for first in range(0, len(ends), _LINES_AT_ONCE):
        reader.read(first, min(first + _LINES_AT_ONCE, len(ends)))
    return reader.columns()


class _Codes(dict[str, int]):
    """A text's number: the next one if it is new."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


class _Reader:
    def __init__(self, data: bytes, begins: NDArray[Any], ends: NDArray[Any]) -> None:
        self._data, self._begins, self._ends = data, begins, ends
        self._texts = _Codes()
        self._tables: dict[Kind, list[Table]] = {kind: [] for kind in FREQUENT}
        self._rare: list[Rare] = []
        self._times = [np.zeros(0)]
        self._num_objects = 0

    def read(self, first: int, end: int) -> None:
        """These lines."""
        records = _records(self._data[self._begins[first] : self._ends[end - 1]])
        times = np.fromiter(map(attrgetter("t"), records), np.float64, len(records))
        actions_of = list(map(attrgetter("a"), records))
        sizes = np.fromiter(map(len, actions_of), np.int64, len(records))
        lines = np.arange(len(records))
        at = self._num_objects + lines + np.cumsum(sizes) - sizes  # an event, then its actions
        rare = lines[self._add(list(map(attrgetter("e"), records)), at, times)]
        line_of, actions = np.repeat(lines, sizes), list(chain.from_iterable(actions_of))
        at_action = self._num_objects + np.arange(len(actions)) + line_of + 1
        more = line_of[self._add(actions, at_action, times[line_of])]
        before = np.append(self._times[-1][-1:] if first else np.nan, times)
        for line in np.union1d(rare, more).tolist():
            record = loads(self._data[self._begins[first + line] : self._ends[first + line]])
            for place, value in enumerate([record["e"], *record["a"]], start=int(at[line])):
                if value["is"] in _RARE:
                    self._rare.append(Rare(place, record["t"], float(before[line]), value))
        self._times.append(times)
        self._num_objects += len(records) + len(actions)

    def _add(self, objects: list[Any], at: NDArray[Any], now: NDArray[Any]) -> NDArray[Any]:
        """Rows for the frequent ones among these; says which are rare."""
        codes = np.fromiter(map(_CODES.__getitem__, map(type, objects)), np.int8, len(objects))
        for kind, code in _FREQUENT.items():
            places = np.flatnonzero(codes == code)
            if len(places):
                table = Table(at=at[places], now=now[places])
                rows = [objects[place] for place in places.tolist()]
                table.update(self._columns(FREQUENT[kind], rows))
                self._tables[kind].append(table)
        return codes == _RARE_CODE

    def _columns(self, names: Iterable[str], rows: list[Any]) -> Iterator[tuple[str, Any]]:
        for name in names:
            values, num = map(attrgetter(name), rows), len(rows)
            match name:
                case "request":
                    pairs = np.fromiter(chain.from_iterable(values), np.int64, 2 * num)
                    yield "group", pairs[::2]
                    yield "sample", pairs[1::2]
                case "reward":
                    yield name, np.array(list(values), np.float64)  # None becomes nan
                case "step":
                    numbers = [-1 if value is None else value for value in values]
                    yield name, np.array(numbers, np.int64)
                case "segments":  # two or more: how many is not asked
                    yield name, np.minimum(np.fromiter(map(len, values), np.int64, num), 2)
                case "samples":
                    texts = [bytes(value)[1:-1].decode() for value in values]
                    yield name, np.fromiter(map(self._texts.__getitem__, texts), np.int64, num)
                case _ if _READ_AS.get(name) is str:
                    yield name, np.fromiter(map(self._texts.__getitem__, values), np.int64, num)
                case _:
                    yield name, np.fromiter(values, np.int64, num)

    def columns(self) -> Columns:
        tables = {kind: _joined(kind, parts) for kind, parts in self._tables.items()}
        times = np.concatenate(self._times)
        first, last = times[[0, -1]].tolist() if len(times) else (0.0, 0.0)
        return Columns(tables, self._rare, list(self._texts), first, last, len(times))


def _records(lines: bytes) -> list[Any]:
    try:
        return _LINE.decode_lines(lines)
    except msgspec.DecodeError:  # a reward that is no number, say: msgspec writes null for it
        plain = [msgspec.json.encode(loads(line)) for line in lines.splitlines()]
        return _LINE.decode_lines(b"\n".join(plain))


def _joined(kind: Kind, parts: list[Table]) -> Table:
    names = ["at", "now", *names_of(kind)]
    if not parts:
        return {name: np.zeros(0, "f8" if name in ("now", "reward") else "i8") for name in names}
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


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
        if size <= self.size:
            return
        room = len(next(iter(self._columns.values())))
        if size > room:
            more = max(size, 2 * room) - room
            for name, (dtype, fill) in self._fills.items():
                self._columns[name] = np.concatenate(
                    [self._columns[name], np.full(more, fill, dtype)]
                )
        self.size = size

    def extend(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Add rows; every column must be given."""
        assert rows.keys() == self._fills.keys(), f"{sorted(rows)} are not the columns"
        begin = self.size
        self.reach(begin + len(next(iter(rows.values()))))
        for name, values in rows.items():
            self._columns[name][begin : self.size] = values


# -- by other processes ----------------------------------------------------------------------------


_LENGTH_BYTES = 8


def read_segments(readers: SegmentReaders) -> Iterator[Columns]:
    """The columns of whole segments, in order."""
    try:
        for place, path in enumerate(readers.paths):
            found = receive(readers.streams[place % len(readers.streams)])
            if found is None:
                raise UserError(f"{path} could not be read: its reader has ended")
            yield found
    finally:
        readers.close()


def send(found: Columns, out: IO[bytes]) -> None:
    """One answer: its length, then a message."""
    arrays = {f"{k.__name__}.{n}": _short(a) for k, t in found.tables.items() for n, a in t.items()}
    for name in ("at", "now", "before"):
        arrays[f"rare.{name}"] = _short(np.array([getattr(rare, name) for rare in found.rare]))
    lines = [found.now_first, found.now_last, found.num_lines]
    values = [rare.value for rare in found.rare]
    data = pack_arrays({"texts": found.texts, "lines": lines, "rare": values}, arrays)
    out.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    out.flush()


def _short(array: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers as bytes or four bytes each, where they fit."""
    if array.dtype == np.int64 and len(array):
        for short in (np.iinfo(np.uint8), np.iinfo(np.int32)):
            if short.min <= array.min() and array.max() <= short.max:
                return array.astype(short.dtype)
    return array


def receive(stream: IO[bytes]) -> Columns | None:
    """The next answer, None if there is no whole one."""
    size = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    data = stream.read(size)
    if not data or len(data) < size:
        return None
    header, arrays = unpack_arrays(data)
    tables: dict[str, Table] = {kind: {} for kind in (*_KINDS, "rare")}
    for name, array in arrays.items():
        kind, _, column = name.partition(".")
        tables[kind][column] = array.astype(np.int64) if array.dtype.kind in "iu" else array
    rows = [tables["rare"][name].tolist() for name in ("at", "now", "before")]
    values = map(value_of, header["rare"])
    rare = [Rare(*row) for row in zip(*rows, values, strict=True)]
    by_kind = {kind: tables[kind.__name__] for kind in FREQUENT}
    return Columns(by_kind, rare, header["texts"], *header["lines"])


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

    def readers(self) -> SegmentReaders | None:
        """Processes that read the beginning of a long log, as long as nothing was read of it."""
        if self._path is not None:
            return None
        started, self._readers = self._readers, None
        return started or start_readers(self._folder)

    def passed(self, path: Path) -> None:
        """A segment was read elsewhere, all of it."""
        self._path, self._offset = path, path.stat().st_size
        self.num_bytes += self._offset

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


def read_columns(tail: LogTail) -> Iterator[Columns]:
    """New lines as columns, in order; the closed segments of a long log on several cores."""
    readers = tail.readers()
    if readers is not None:
        for path, found in zip(readers.paths, read_segments(readers), strict=True):
            tail.passed(path)
            yield found
    for chunk in tail.chunks():
        yield columns(chunk)


def main() -> None:
    ends = [int(word) for word in sys.argv[1:]]
    paths = json.load(sys.stdin)
    gc.disable()  # nothing lives longer than an answer
    mine = next((place for place in range(1, len(ends)) if os.fork() == 0), 0)
    for place, end in enumerate(ends):
        if place != mine:
            os.close(end)  # or nobody would notice that its reader has ended
    with open(ends[mine], "wb") as out:
        for path in paths[mine :: len(ends)]:
            send(raw_columns(Path(path).read_bytes()), out)


if __name__ == "__main__":
    main()
