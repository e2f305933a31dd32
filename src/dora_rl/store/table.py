"""The table: rows of named columns, one for each sample, in memory and in a file.

The data plane of a run. Which group is ready for whom, and exactly once, is the ledger's to say
(`core.ledger`); here are the bytes. Four operations: put, extend, read, drop. Nothing waits, polls,
pads or pickles. Not safe from several threads: whoever shares a table between them locks it.

Invariant: with a file, an operation that returned survives a crash, and one that raised changed
nothing. A sample has one row; put again, the new row takes the place of the old one.

The file is a mark and then one frame for each operation (see `io.append_log`). A torn tail (the
writer died) is cut off; damage is an error that names the place, since dropping what follows would
lose rows. A body is a JSON header and the arrays and byte strings as they lie in memory:

    body = 4 bytes H | H bytes of JSON header | the blobs of its arrays and byte strings, in order

    {"do": "put", "rows": [[number, group, version, sample, columns], ...]}
    {"do": "extend", "rows": [[number, columns], ...]}      of rows that are there
    {"do": "drop", "group": group}

Older files have five more values between sample and columns, and a "state" record in front: both
were for consumers that took rows, and no run had any.

A value is a numpy array, bytes, or anything JSON can carry. A list or tuple of only ints or only
floats becomes an array (int32 where all fit, else int64; float64); an empty one is of ints. Arrays
are copied in and read-only after. What is decoded equals what was put, type and bits.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from dora_rl.io.append_log import AppendLog, Damaged, frame, frames
from dora_rl.types import GroupId, RequestId, Version

MAGIC = b"dora-table-1\n"
# A file this much larger than its live rows, and than it was after its last rewriting, is mostly
# operations of the past.
REWRITE_BYTES_MIN = 4 << 20
REWRITE_RATIO = 4

Value: TypeAlias = Any  # np.ndarray | bytes | str | int | float | bool | None | list | dict
Columns: TypeAlias = Mapping[str, Value]

HEADER = struct.Struct("<I")
# Smaller arrays are cheaper to copy than to refer to.
COPY_BYTES_MAX = 1 << 16
SCALARS = (str, int, float, bool, type(None))


class TableError(Exception):
    """The table refused an operation; it is as it was before."""


class TableCorrupt(TableError):
    """The file is damaged at a place that no crash explains."""


class TableClosed(TableError):
    """The table was closed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample: its columns, and the version that generated it. `number` is the file's."""

    request: RequestId
    version: Version
    columns: Columns
    number: int = -1


class Table:
    """With `path`, every operation is appended to that file, and what it holds is restored."""

    def __init__(self, path: Path | None = None) -> None:
        self._rows: dict[GroupId, dict[int, Row]] = {}
        self._next_number = 0
        self._num_bytes = 0
        self._closed = False
        self._rewritten_bytes = 0
        self._file: AppendLog | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = AppendLog(path)
            self._restore(self._file)

    def put(self, rows: Sequence[Row]) -> None:
        """Add rows, all or none, in place of what these samples had. Values are copied."""
        first = self._next_number
        kept = [
            replace(row, columns=as_values(row.columns), number=first + place)
            for place, row in enumerate(rows)
        ]
        self._append(_put_record(kept))
        for row in kept:
            self._set(row)

    def extend(self, columns_of: Mapping[RequestId, Columns]) -> None:
        """Add columns to rows that are there, all or none. A value is written once."""
        longer: list[tuple[Row, dict[str, Value]]] = []
        for request, columns in columns_of.items():
            row = self._rows.get(request.group, {}).get(request.sample)
            if row is None:
                raise TableError(f"there is no row of {request}")
            if again := sorted(row.columns.keys() & columns.keys()):
                raise TableError(f"the row of {request} already has {again}")
            longer.append((row, as_values(columns)))
        self._append(_extend_record(longer))
        for row, values in longer:
            self._set(replace(row, columns={**row.columns, **values}))

    def read(self, group: GroupId, sample: int | None = None) -> list[Row]:
        """The rows of a group that are here, by sample; with `sample`, that one if it is here."""
        rows = self._rows.get(group, {})
        if sample is not None:
            return [rows[sample]] if sample in rows else []
        return [rows[sample] for sample in sorted(rows)]

    def drop(self, group: GroupId) -> None:
        """A group has ended. One that is not here is no error."""
        if group in self._rows:
            self._append(encode({"do": "drop", "group": group}, ()))
            self._forget(group)

    def groups(self) -> list[GroupId]:
        """The groups that have rows here."""
        return list(self._rows)

    def sync(self) -> None:
        """What was written so far survives a power cut."""
        if self._file is not None and not self._closed:
            self._file.sync()

    def close(self) -> None:
        if self._file is not None and not self._closed:
            self._file.close()
        self._closed = True

    # -- the rows in memory -----------------------------------------------------------------------

    def _set(self, row: Row) -> None:
        samples = self._rows.setdefault(row.request.group, {})
        old = samples.get(row.request.sample)
        self._num_bytes += num_bytes_of_all(row.columns)
        self._num_bytes -= num_bytes_of_all(old.columns) if old is not None else 0
        samples[row.request.sample] = row
        self._next_number = max(self._next_number, row.number + 1)

    def _forget(self, group: GroupId) -> None:
        for row in self._rows.pop(group, {}).values():
            self._num_bytes -= num_bytes_of_all(row.columns)

    # -- the file ---------------------------------------------------------------------------------

    def _append(self, record: list[Any]) -> None:
        """Before the change, so that a failed write leaves the table as it was."""
        if self._closed:
            raise TableClosed("the table is closed")
        if self._file is None:
            return
        live_bytes = max(self._num_bytes, self._rewritten_bytes)
        try:
            # So that reading the file does not take longer the longer a run is.
            if self._file.num_bytes > REWRITE_BYTES_MIN + REWRITE_RATIO * live_bytes:
                rows = chain.from_iterable(samples.values() for samples in self._rows.values())
                records = (frame(_put_record([row])) for row in rows)
                self._file.rewrite(chain([MAGIC], chain.from_iterable(records)))
                self._rewritten_bytes = self._file.num_bytes
            self._file.append(*frame(record))
        except OSError as error:
            text = f"cannot write {self._file.path} ({error.strerror}); free some room"
            raise TableError(text) from error

    def _restore(self, file: AppendLog) -> None:
        """What the file holds; a torn tail is cut off."""
        if file.num_bytes < len(MAGIC):
            file.cut(0)
            file.append(MAGIC)
        content, good = memoryview(file.path.read_bytes()), len(MAGIC)
        if bytes(content[:good]) != MAGIC:
            raise TableCorrupt(f"{file.path} is not a table of this program")
        requests: dict[int, RequestId] = {}
        try:
            for end, body in frames(content, good, str(file.path)):
                self._repeat(body, requests, file.path)
                good = end
        except Damaged as error:
            raise TableCorrupt(str(error)) from error
        file.cut(good)

    def _repeat(self, body: memoryview, requests: dict[int, RequestId], path: Path) -> None:
        """One operation of the file; `requests` are those of its rows, by their number."""
        header, place = decode(body)
        kind = header["do"]
        if kind == "put":
            for row in _rows_of(header["rows"], body, place):
                requests[row.number] = row.request
                self._set(row)
        elif kind == "extend":
            for number, entries in header["rows"]:
                columns, place = read_columns(entries, body, place)
                group, sample = requests[number]
                row = self._rows[group][sample]
                self._set(replace(row, columns={**row.columns, **columns}))
        elif kind == "drop":
            self._forget(header["group"])
        elif kind != "state":
            raise TableCorrupt(f"{path} has a record {kind!r} that no run writes")


def peek(path: Path, request: RequestId) -> Columns | None:
    """The columns of a sample as it was put last, while another process goes on writing the file;
    None if it is not there (any more). The file is bounded, so one look at all of it is cheap
    enough for a reader who asks for a sample now and then."""
    found: Columns | None = None
    content = memoryview(path.read_bytes()) if path.is_file() else memoryview(b"")
    for _, body in frames(content, len(MAGIC), str(path)):  # a torn tail is left to the owner
        header, place = decode(body)
        if header["do"] == "put":
            for row in _rows_of(header["rows"], body, place):
                found = row.columns if row.request == request else found
    return found


def _put_record(rows: Iterable[Row]) -> list[Any]:
    blobs: list[Any] = []
    entries: list[list[Any]] = []
    for row in rows:
        group, sample = row.request
        columns = describe_columns(row.columns, blobs)
        entries.append([row.number, group, row.version, sample, columns])
    return encode({"do": "put", "rows": entries}, blobs)


def _extend_record(longer: Iterable[tuple[Row, Columns]]) -> list[Any]:
    blobs: list[Any] = []
    rows = [[row.number, describe_columns(values, blobs)] for row, values in longer]
    return encode({"do": "extend", "rows": rows}, blobs)


def _rows_of(entries: Sequence[Sequence[Any]], body: memoryview, place: int) -> Iterator[Row]:
    for number, group, version, sample, *_, described in entries:
        columns, place = read_columns(described, body, place)
        yield Row(RequestId(group, sample), version, columns, number)


# -- values and their bytes ------------------------------------------------------------------------


def as_value(value: object) -> Value:
    """The form in which a value is kept. Raises TypeError for what cannot be kept."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iufb":
            raise TypeError(f"a table cannot hold arrays of {value.dtype}")
        return _fixed(value.copy())
    if isinstance(value, (tuple, list)):
        return _as_sequence(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, dict):
        return json.loads(json.dumps(value))  # also a copy, so that nobody can change it later
    raise TypeError(f"a table cannot hold {type(value).__name__}; give arrays, bytes or JSON")


def _as_sequence(value: Sequence[Any]) -> Value:
    kinds = set(map(type, value))
    if kinds == {float}:
        return _fixed(np.array(value, np.float64))
    ends = (min(value), max(value)) if kinds == {int} else ()
    if kinds <= {int} and all(-(2**63) <= n < 2**63 for n in ends):
        fits = all(-(2**31) <= n < 2**31 for n in ends)
        return _fixed(np.array(value, np.int32 if fits else np.int64))
    return json.loads(json.dumps(value))


def _fixed(array: np.ndarray) -> np.ndarray:
    """Nobody can change it any more."""
    array.setflags(write=False)
    return array


def num_bytes_of(value: Value) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, (list, dict)):
        return len(json.dumps(value))
    return 8


def as_values(columns: Columns) -> dict[str, Value]:
    return {column: as_value(value) for column, value in columns.items()}


def num_bytes_of_all(values: Columns) -> int:
    return sum(map(num_bytes_of, values.values()))


def describe_columns(columns: Columns, blobs: list[Any]) -> list[list[object]]:
    """The header's entry for one row; appends the row's blobs."""
    entries: list[list[object]] = []
    for name, value in columns.items():
        if isinstance(value, np.ndarray):
            small = value.nbytes <= COPY_BYTES_MAX
            blobs.append(value.tobytes() if small else value.reshape(-1).data.cast("B"))
            entries.append([name, _dtype_code(value.dtype), value.shape])
        elif isinstance(value, bytes):
            blobs.append(value)
            entries.append([name, "bytes", len(value)])
        else:
            entries.append([name, "json", value])
    return entries


@cache
def _dtype_code(dtype: np.dtype) -> str:
    return dtype.str


def read_columns(
    entries: Sequence[Sequence[Any]], body: memoryview, place: int
) -> tuple[dict[str, Value], int]:
    """The columns of one row, and where the next row's blobs begin."""
    columns: dict[str, Value] = {}
    for name, kind, detail in entries:
        if kind == "json":
            columns[name] = detail
        elif kind == "bytes":
            columns[name] = bytes(body[place : place + detail])
            place += detail
        else:
            # A copy, so that one small array does not keep a whole record in memory.
            array = np.frombuffer(body, kind, prod(detail), place).copy().reshape(detail)
            columns[name] = _fixed(array)
            place += array.nbytes
    return columns, place


def encode(header: Mapping[str, object], blobs: Sequence[Any]) -> list[Any]:
    """The buffers of one record's body."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return [HEADER.pack(len(text)) + text, *blobs]


def decode(body: memoryview) -> tuple[dict[str, Any], int]:
    """The header of a record's body, and where its blobs begin."""
    (size,) = HEADER.unpack_from(body)
    header = json.loads(bytes(body[HEADER.size : HEADER.size + size]))
    return cast(dict[str, Any], header), HEADER.size + size
