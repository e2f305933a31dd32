"""The streaming sample table: rows are samples, columns are components that arrive over time.

Never polls, pads or pickles, and never hands a row to the same consumer twice. Invariants: a
consumer sees a row when the columns it asked for are all there; what was put is dropped exactly
once, after every consumer took it and it was released; with a file, an operation that returned
survives a crash. The rows' metadata (`table_index`) is kept apart from their payload.

    rollout ─put(prompt, tokens, log-probs)─▶ ┌───────┐ ─take(rewarder: token_ids)──▶ reward
                                              │ table │ ◀─extend(reward)─────────────
    trainer ◀─take(trainer: token_ids, reward)└───────┘ then release, when the step is committed

| who waits            | for what                       | unblocked by        |
|----------------------|--------------------------------|---------------------|
| put of a new group   | room (rows_max, bytes_max)     | take, release, drop |
| wait, take           | enough ready rows or groups    | put, extend, untake |
Rows of a group that has begun and `extend` never wait: what is complete can always be read, so a
full table empties.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dora_rl.data import table_records as records
from dora_rl.data.balance import balance
from dora_rl.data.table_codec import (
    Columns,
    Value,
    as_values,
    num_bytes_of_all,
    num_tokens_of_all,
)
from dora_rl.data.table_index import RowMeta, TableError, TableIndex
from dora_rl.data.table_log import TableCorrupt, TableLog, write_log
from dora_rl.data.table_rows import (
    NewRow,
    Row,
    TableClosed,
    TableFull,
    TableStats,
    Want,
    meta_of,
    stats_of,
)
from dora_rl.data.table_waits import TableWaits, Waiting
from dora_rl.types import GroupId

__all__ = ["NewRow", "Row", "Table", "TableClosed", "TableCorrupt", "TableError", "TableFull"]


class Table:
    """`consumers` names every reader and the columns it needs. One lock; safe from any thread.

    With `path` every operation is appended to that file, and an existing file is restored first.
    With `auto_release` a row goes when the last consumer takes it; otherwise `release` says when it
    will not be given back any more.
    """

    def __init__(
        self,
        consumers: Mapping[str, Sequence[str]],
        *,
        rows_max: int = 1 << 20,
        bytes_max: int = 16 << 30,
        auto_release: bool = False,
        token_columns: Sequence[str] = ("prompt_ids", "token_ids"),
        path: str | Path | None = None,
        fsync: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows_max = rows_max
        self.bytes_max = bytes_max
        self._token_columns = frozenset(token_columns)
        self._index = TableIndex(consumers, auto_release)
        self._payload: dict[int, dict[str, Value]] = {}
        self._lock = threading.Lock()
        self._waits = TableWaits(self._lock, list(self._index.consumers), clock)
        self._closed = False
        self._log = TableLog(Path(path), fsync=fsync) if path is not None else None
        if self._log is not None:
            self._restore(self._log)

    # Writing

    def put(self, rows: Sequence[NewRow], *, timeout_s: float = 0.0, name: str = "") -> list[int]:
        """Add rows, all or none; returns their numbers. A new group waits for room."""
        payloads = [as_values(row.columns) for row in rows]
        metas = [
            (meta_of(row, values, self._token_columns), row.num_in_group)
            for row, values in zip(rows, payloads, strict=True)
        ]
        with self._lock:
            self._check_new(metas)
            self._await_room(metas, timeout_s, name)
            for number, (meta, _) in enumerate(metas):
                meta.index = self._index.next_index + number
            self._append(records.put_record, metas, payloads)
            for (meta, num_in_group), values in zip(metas, payloads, strict=True):
                self._payload[meta.index] = values
                self._index.add(meta, num_in_group)
            self._waits.ring_readers()
        return [meta.index for meta, _ in metas]

    def extend(self, columns_of: Mapping[int, Columns]) -> None:
        """Add columns to rows that are there, all or none. Never waits."""
        values_of = {index: as_values(columns) for index, columns in columns_of.items()}
        with self._lock:
            self._check_open()
            for index, values in values_of.items():
                self._index.check_extend(index, values)
            self._append(records.extend_record, values_of)
            self._apply_extend(values_of)
            self._waits.ring_readers()

    # Reading

    def wait(
        self,
        consumer: str,
        *,
        num_rows: int = 0,
        num_groups: int = 0,
        versions: range | None = None,
        timeout_s: float,
        name: str = "",
    ) -> bool:
        """Sleep until so many rows or groups are ready; False if the deadline passed first."""
        with self._lock:
            return self._wait(consumer, Want(num_rows, num_groups, versions), timeout_s, name)

    async def wait_async(
        self,
        consumer: str,
        *,
        num_rows: int = 0,
        num_groups: int = 0,
        versions: range | None = None,
        timeout_s: float,
        name: str = "",
    ) -> bool:
        """The same inside an event loop, which goes on meanwhile."""
        want = Want(num_rows, num_groups, versions)
        ready = await self._waits.sleep(
            consumer,
            lambda: self._closed or self._is_ready(consumer, want),
            timeout_s,
            name or consumer,
            str(want),
        )
        self._check_open()
        return ready

    def take(
        self,
        consumer: str,
        *,
        num_rows: int = 0,
        num_groups: int = 0,
        group: GroupId | None = None,
        versions: range | None = None,
        columns: Sequence[str] | None = None,
        timeout_s: float = 0.0,
        name: str = "",
    ) -> list[Row]:
        """Rows that this consumer is not given again; oldest version first, then lowest number.

        Give one of: `num_rows`; `num_groups` (complete groups, their rows side by side); `group`
        (that one, if it is complete, without waiting). All or nothing: an empty list if the
        deadline passed first.
        """
        assert bool(num_rows) + bool(num_groups) + (group is not None) == 1
        want = Want(num_rows, num_groups, versions)
        with self._lock:
            if group is not None:
                self._check_open()
                ready = group in self._index.ready_groups(consumer)
                found = self._index.rows_of(group) if ready else []
            else:
                ready = self._wait(consumer, want, timeout_s, name)
                found = self._first(consumer, want) if ready else []
            rows = [self._row(index, columns or self._needs(consumer)) for index in found]
            if found:
                self._append(records.take_record, consumer, found)
                self._forget(self._index.take(consumer, found))
        return rows

    def take_balanced(
        self, consumer: str, num_ranks: int, *, equal_counts: bool = False, **want: Any
    ) -> list[list[Row]]:
        """`take(consumer, **want)`, split by token count; one list of rows for each rank."""
        rows = self.take(consumer, **want)
        shares = balance([row.num_tokens for row in rows], num_ranks, equal_counts=equal_counts)
        return [[rows[i] for i in share] for share in shares]

    def peek(
        self,
        consumer: str,
        *,
        num_rows: int = 0,
        num_groups: int = 0,
        versions: range | None = None,
        columns: Sequence[str] | None = None,
    ) -> list[Row]:
        """What `take` would give now, or as much of it as there is. Marks nothing."""
        with self._lock:
            found = self._first(consumer, Want(num_rows, num_groups, versions))
            return [self._row(index, columns or self._needs(consumer)) for index in found]

    def read(self, indices: Iterable[int], columns: Sequence[str] | None = None) -> list[Row]:
        """Rows by number, whoever took them; all their columns unless some are named."""
        indices = list(indices)
        with self._lock:
            self._index.check_exist(indices)
            return [self._row(index, columns) for index in indices]

    # Ending

    def untake(self, consumer: str, indices: Iterable[int]) -> None:
        """Give rows back that were not used (a step that was not committed before a crash)."""
        indices = list(indices)
        with self._lock:
            self._check_open()
            self._index.check_untake(consumer, indices)
            self._append(records.untake_record, consumer, indices)
            self._index.untake(consumer, indices)
            self._waits.ring_readers()

    def release(self, indices: Iterable[int]) -> None:
        """These rows will not be given back; they go once every consumer has taken them."""
        indices = list(indices)
        with self._lock:
            self._check_open()
            self._index.check_exist(indices)
            self._append(records.release_record, indices)
            self._forget(self._index.release(indices))

    def drop(self, group: GroupId) -> None:
        """End a group that nobody will read (failed, filtered), whole, half arrived or not here."""
        with self._lock:
            self._check_open()
            if group in self._index.groups:
                self._append(records.drop_record, group)
                self._forget(self._index.drop_group(group))
                self._waits.ring_room()

    def close(self) -> None:
        """Wake everybody who waits; they get `TableClosed`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._waits.ring_readers()
            self._waits.ring_room()
            if self._log is not None:
                self._log.close()

    # Durability

    def sync(self) -> None:
        """What was written so far survives a power cut."""
        with self._lock:
            if self._log is not None and not self._closed:
                self._log.sync()

    def checkpoint(self, path: str | Path | None = None) -> None:
        """Rewrite the file with live rows only, or write them to another file to restore from."""
        with self._lock:
            self._check_open()
            bodies = records.snapshot(self._index, self._payload)
            if path is not None:
                write_log(Path(path), bodies)
            else:
                assert self._log is not None, "a table in memory needs a path to checkpoint to"
                self._log.rewrite(bodies)

    def _restore(self, log: TableLog) -> None:
        empty = True
        for body in log.read():
            records.replay(body, self._index, self._payload, self._apply_extend)
            empty = False
        self._index.check_invariants()
        if empty:
            log.rewrite(records.snapshot(self._index, self._payload))

    def _append(self, make: Callable[..., list[Any]], *arguments: Any) -> None:
        """Log before the change, so that a failed write leaves the table as it was."""
        if self._log is None:
            return
        if self._log.mostly_old(self._index.num_bytes):
            self._log.rewrite(records.snapshot(self._index, self._payload))
        self._log.append(make(*arguments))

    # Looking

    def stats(self) -> TableStats:
        with self._lock:
            return stats_of(self._index)

    def taken_by(self, consumer: str) -> list[int]:
        """Rows that the consumer took and that are still here (to untake after a crash)."""
        with self._lock:
            return self._index.taken_by(consumer)

    def rows_of(self, group: GroupId, sample: int | None = None) -> list[int]:
        """Numbers of the group's rows that are here, by sample, or of one sample."""
        with self._lock:
            return self._index.rows_of(group, sample)

    def groups(self) -> list[GroupId]:
        """The groups that have rows here."""
        with self._lock:
            return list(self._index.groups)

    def waiting(self) -> list[Waiting]:
        """Who waits, for what and since when."""
        with self._lock:
            return self._waits.waiting()

    def check_invariants(self) -> None:
        with self._lock:
            self._index.check_invariants()
            assert self._payload.keys() == self._index.rows.keys()

    # Inside the lock

    def _check_open(self) -> None:
        if self._closed:
            raise TableClosed("the table is closed")

    def _check_new(self, metas: Sequence[tuple[RowMeta, int]]) -> None:
        self._check_open()
        self._index.check_add(metas)

    def _await_room(
        self, metas: Sequence[tuple[RowMeta, int]], timeout_s: float, name: str
    ) -> None:
        new = {meta.group: num for meta, num in metas if meta.group not in self._index.groups}
        num_rows, num_bytes = sum(new.values()), sum(meta.num_bytes for meta, _ in metas)
        if num_rows > self.rows_max or (num_bytes > self.bytes_max and new):
            raise TableFull(
                f"{num_rows} rows of {num_bytes} bytes can never fit: "
                f"rows_max is {self.rows_max}, bytes_max {self.bytes_max}"
            )

        def fits() -> bool:
            return (
                self._index.num_charged + num_rows <= self.rows_max
                and self._index.num_bytes + num_bytes <= self.bytes_max
            )

        if not new or fits():
            return
        wants = f"room for {num_rows} rows, {num_bytes} bytes"
        self._waits.wait_room(lambda: self._closed or fits(), timeout_s, name or "put", wants)
        self._check_new(metas)  # somebody else may have put the same rows meanwhile
        if not fits():
            raise TableFull(
                f"no {wants} after {timeout_s:g} s: {self._index.num_charged} of "
                f"{self.rows_max} rows, {self._index.num_bytes} of {self.bytes_max} bytes are used"
            )

    def _apply_extend(self, values_of: Mapping[int, dict[str, Value]]) -> None:
        for index, values in values_of.items():
            self._payload[index].update(values)
            num_tokens = num_tokens_of_all(values, self._token_columns)
            self._index.extend(index, values, num_bytes_of_all(values), num_tokens)

    def _is_ready(self, consumer: str, want: Want) -> bool:
        rows, groups = self._index.ready_rows(consumer), self._index.ready_groups(consumer)
        return (
            rows.count(want.versions) >= want.num_rows
            and groups.count(want.versions) >= want.num_groups
        )

    def _wait(self, consumer: str, want: Want, timeout_s: float, name: str) -> bool:
        def done() -> bool:
            return self._closed or self._is_ready(consumer, want)

        if not done() and timeout_s > 0:
            self._waits.wait_ready(consumer, done, timeout_s, name or consumer, str(want))
        self._check_open()
        return done()

    def _first(self, consumer: str, want: Want) -> list[int]:
        if want.num_rows:
            return self._index.ready_rows(consumer).first(want.num_rows, want.versions)
        groups = self._index.ready_groups(consumer).first(want.num_groups, want.versions)
        return [index for group in groups for index in self._index.rows_of(group)]

    def _needs(self, consumer: str) -> Sequence[str]:
        return self._index.consumers[consumer]

    def _row(self, index: int, columns: Sequence[str] | None) -> Row:
        meta, payload = self._index.rows[index], self._payload[index]
        chosen = dict(payload) if columns is None else {c: payload[c] for c in columns}
        return Row(index, meta.group, meta.version, meta.sample, meta.num_tokens, chosen)

    def _forget(self, dropped: Sequence[int]) -> None:
        for index in dropped:
            del self._payload[index]
        if dropped:
            self._waits.ring_room()
