"""The table: rows of named columns, one for each sample, in memory and in a file.

The data plane of a run. Which group is ready for whom, and exactly once, is the ledger's to say
(`core.ledger`); here are the bytes. Four operations: put, extend, read, drop. Nothing waits, polls,
pads or pickles. Not safe from several threads: whoever shares a table between them locks it.

Invariant: an operation that returned survives a crash, and one that raised changed nothing. A
sample has one row; put again, the new row takes the place of the old one.

The file is a mark and then one frame for each operation (see `io.append_log`). A torn tail (the
writer died) is cut off; damage is an error that names the place, since dropping what follows would
lose rows. A body is a JSON header and the arrays as they lie in memory:

    body = 4 bytes H | H bytes of JSON header | the bytes of its arrays, in order

    {"do": "put", "rows": [[number, group, version, sample, columns], ...]}
    {"do": "extend", "rows": [[number, columns]]}           of a row that is there
    {"do": "drop", "group": group}

Older files have five more values between sample and columns, and a "state" record in front: both
were for consumers that took rows, and no run had any.

A value is a numpy array or anything JSON can carry. Arrays are copied in and read-only after. What
is decoded equals what was put, type and bits.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dora_rl.io.append_log import AppendLog, Damaged, frame, frames
from dora_rl.io.codec import dumps, loads
from dora_rl.types import GroupId, RequestId, UserError, Version

MAGIC = b"dora-table-1\n"
# A file this much larger than its live rows, and than it was after its last rewriting, is mostly
# operations of the past.
REWRITE_BYTES_MIN = 4 << 20
REWRITE_RATIO = 4

Columns: TypeAlias = Mapping[str, Any]  # arrays, and what JSON can carry

HEADER = struct.Struct("<I")
# Smaller arrays are cheaper to copy than to refer to.
COPY_BYTES_MAX = 1 << 16
SCALARS = (str, int, float, bool, type(None))


class TableError(Exception):
    """The table refused an operation; it is as it was before."""


class TableCorrupt(TableError, UserError):
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
    """Every operation is appended to the file `path`, and what that holds is restored."""

    def __init__(self, path: Path) -> None:
        self._rows: dict[GroupId, dict[int, Row]] = {}
        self._next_number = 0
        self._live_bytes = 0
        self._rewritten_bytes = 0
        self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = AppendLog(path)
        self._restore()

    def put(self, rows: Sequence[Row]) -> None:
        """Add rows, all or none, in place of what these samples had. Arrays are copied."""
        kept = [
            replace(row, columns=kept_columns(row.columns), number=self._next_number + place)
            for place, row in enumerate(rows)
        ]
        self._append(_put_record(kept))
        for row in kept:
            self._set(row)

    def extend(self, request: RequestId, columns: Columns) -> None:
        """Add columns to a row that is there. A value is written once."""
        row = self.row(request)
        if row is None:
            raise TableError(f"there is no row of {request}")
        if again := sorted(row.columns.keys() & columns.keys()):
            raise TableError(f"the row of {request} already has {again}")
        kept, arrays = kept_columns(columns), list[Any]()
        described = [[row.number, describe_columns(kept, arrays)]]
        self._append(encode({"do": "extend", "rows": described}, arrays))
        self._set(replace(row, columns={**row.columns, **kept}))

    def read(self, group: GroupId) -> list[Row]:
        """The rows of a group that are here, by sample."""
        return [row for _, row in sorted(self._rows.get(group, {}).items())]

    def row(self, request: RequestId) -> Row | None:
        """That of one sample, if it is here."""
        return self._rows.get(request.group, {}).get(request.sample)

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
        if not self._closed:
            self._file.sync()

    def close(self) -> None:
        if not self._closed:
            self._file.close()
        self._closed = True

    # -- the rows in memory -----------------------------------------------------------------------

    def _set(self, row: Row) -> None:
        samples = self._rows.setdefault(row.request.group, {})
        old = samples.get(row.request.sample)
        self._live_bytes += num_bytes(row) - (num_bytes(old) if old is not None else 0)
        samples[row.request.sample] = row
        self._next_number = max(self._next_number, row.number + 1)

    def _forget(self, group: GroupId) -> None:
        self._live_bytes -= sum(map(num_bytes, self._rows.pop(group, {}).values()))

    # -- the file ---------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self._file.path

    def _append(self, record: list[Any]) -> None:
        """Before the change, so that a failed write leaves the table as it was."""
        if self._closed:
            raise TableClosed("the table is closed")
        live_bytes = max(self._live_bytes, self._rewritten_bytes)
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

    def _restore(self) -> None:
        """What the file holds; a torn tail is cut off."""
        file = self._file
        if file.num_bytes < len(MAGIC):
            file.cut(0)
            file.append(MAGIC)
        content, good = memoryview(file.path.read_bytes()), len(MAGIC)
        if bytes(content[:good]) != MAGIC:
            raise TableCorrupt(f"{file.path} is not a table of this program")
        requests: dict[int, RequestId] = {}
        try:
            for end, body in frames(content, good, str(file.path)):
                self._repeat(body, requests)
                good = end
        except Damaged as error:
            raise TableCorrupt(str(error)) from error
        file.cut(good)

    def _repeat(self, body: memoryview, requests: dict[int, RequestId]) -> None:
        """One operation of the file; `requests` are those of its rows, by their number."""
        header, place = decode(body)
        match header["do"]:
            case "put":
                for row in _rows_of(header["rows"], body, place):
                    requests[row.number] = row.request
                    self._set(row)
            case "extend":
                for number, described in header["rows"]:
                    columns, place = read_columns(described, body, place)
                    group, sample = requests[number]
                    row = self._rows[group][sample]
                    self._set(replace(row, columns={**row.columns, **columns}))
            case "drop":
                self._forget(header["group"])
            case "state":
                pass
            case kind:
                raise TableCorrupt(f"{self._file.path} has a record {kind!r} that no run writes")


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


def _put_record(rows: Sequence[Row]) -> list[Any]:
    arrays: list[Any] = []
    entries = [
        [row.number, group, row.version, sample, describe_columns(row.columns, arrays)]
        for row in rows
        for group, sample in [row.request]
    ]
    return encode({"do": "put", "rows": entries}, arrays)


def _rows_of(entries: Sequence[Sequence[Any]], body: memoryview, place: int) -> Iterator[Row]:
    for number, group, version, sample, *_, described in entries:
        columns, place = read_columns(described, body, place)
        yield Row(RequestId(group, sample), version, columns, number)


# -- values and their bytes ------------------------------------------------------------------------


def kept_columns(columns: Columns) -> dict[str, Any]:
    """As they are kept. Raises TypeError for what cannot be."""
    return {name: _kept(value) for name, value in columns.items()}


def _kept(value: object) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iufb":
            raise TypeError(f"a table cannot hold arrays of {value.dtype}")
        return _fixed(value.copy())
    # The detour makes a copy, so that nobody can change it later.
    return value if isinstance(value, SCALARS) else json.loads(json.dumps(value))


def _fixed(array: np.ndarray) -> np.ndarray:
    """Nobody can change it any more."""
    array.setflags(write=False)
    return array


def num_bytes(row: Row) -> int:
    """About how much of the file a row needs."""
    values = row.columns.values()
    return sum(v.nbytes if isinstance(v, np.ndarray) else len(str(v)) for v in values)


def describe_columns(columns: Columns, arrays: list[Any]) -> list[list[object]]:
    """The header's entry for one row; appends the bytes of the row's arrays."""
    entries: list[list[object]] = []
    for name, value in columns.items():
        if isinstance(value, np.ndarray):
            small = value.nbytes <= COPY_BYTES_MAX
            arrays.append(value.tobytes() if small else value.reshape(-1).data.cast("B"))
            entries.append([name, value.dtype.str, value.shape])
        else:
            entries.append([name, "json", value])
    return entries


def read_columns(
    entries: Sequence[Sequence[Any]], body: memoryview, place: int
) -> tuple[dict[str, Any], int]:
    """The columns of one row, and where the next row's arrays begin."""
    columns: dict[str, Any] = {}
    for name, kind, detail in entries:
        if kind == "json":
            columns[name] = detail
        else:
            # A copy, so that one small array does not keep a whole record in memory.
            array = np.frombuffer(body, kind, prod(detail), place).copy().reshape(detail)
            columns[name] = _fixed(array)
            place += array.nbytes
    return columns, place


def encode(header: Mapping[str, object], arrays: Sequence[Any]) -> list[Any]:
    """The buffers of one record's body."""
    text = dumps(header)
    return [HEADER.pack(len(text)) + text, *arrays]


def decode(body: memoryview) -> tuple[dict[str, Any], int]:
    """The header of a record's body, and where its arrays begin."""
    (size,) = HEADER.unpack_from(body)
    return loads(body[HEADER.size : HEADER.size + size]), HEADER.size + size
