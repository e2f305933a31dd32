"""The table: rows of named columns, one for each sample, in memory and in a file.

The data plane of a run. Which group is ready for whom, and exactly once, is the ledger's to say
(`core.ledger`); here are the bytes. Four operations: put, extend, read, drop. Nothing waits, polls,
pads or pickles. Not safe from several threads: whoever shares a table between them locks it.

Invariant: with a file, an operation that returned survives a crash, and one that raised changed
nothing. A sample has one row; put again, the new row takes the place of the old one.

    {"do": "put", "rows": [[number, group, version, sample, columns], ...]}
    {"do": "extend", "rows": [[number, columns], ...]}      of rows that are there
    {"do": "drop", "group": group}

Older files have five more values between sample and columns, and a "state" record in front: both
were for consumers that took rows, and no run had any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dora_rl.store.record_log import TableCorrupt, TableError, TableLog, whole_records
from dora_rl.store.values import (
    Columns,
    Value,
    as_values,
    decode,
    describe_columns,
    encode,
    num_bytes_of_all,
    read_columns,
)
from dora_rl.types import GroupId, RequestId, Version


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
        self._log = TableLog(path) if path is not None else None
        if self._log is not None:
            self._restore(self._log)

    def put(self, rows: Sequence[Row]) -> None:
        """Add rows, all or none, in place of what these samples had. Values are copied."""
        first = self._next_number
        kept = [
            replace(row, columns=as_values(row.columns), number=first + place)
            for place, row in enumerate(rows)
        ]
        self._append(_put_record, kept)
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
        self._append(_extend_record, longer)
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
            self._append(_drop_record, group)
            self._forget(group)

    def groups(self) -> list[GroupId]:
        """The groups that have rows here."""
        return list(self._rows)

    def sync(self) -> None:
        """What was written so far survives a power cut."""
        if self._log is not None and not self._closed:
            self._log.sync()

    def close(self) -> None:
        if not self._closed and self._log is not None:
            self._log.close()
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

    def _append(self, make: Any, what: Any) -> None:
        """Before the change, so that a failed write leaves the table as it was."""
        if self._closed:
            raise TableClosed("the table is closed")
        if self._log is None:
            return
        if self._log.mostly_old(self._num_bytes):
            self._log.rewrite(_put_record([row]) for row in self._live())
        self._log.append(make(what))

    def _live(self) -> Iterator[Row]:
        for samples in self._rows.values():
            yield from samples.values()

    def _restore(self, log: TableLog) -> None:
        requests: dict[int, RequestId] = {}
        for body in log.read():
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
                raise TableCorrupt(f"{log.path} has a record {kind!r} that no run writes")


def peek(path: Path, request: RequestId) -> Columns | None:
    """The columns of a sample as it was put last, while another process goes on writing the file;
    None if it is not there (any more). The file is bounded, so one look at all of it is cheap
    enough for a reader who asks for a sample now and then."""
    found: Columns | None = None
    for body in whole_records(path):
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


def _drop_record(group: GroupId) -> list[Any]:
    return encode({"do": "drop", "group": group}, ())


def _rows_of(entries: Sequence[Sequence[Any]], body: memoryview, place: int) -> Iterator[Row]:
    for number, group, version, sample, *_, described in entries:
        columns, place = read_columns(described, body, place)
        yield Row(RequestId(group, sample), version, columns, number)
