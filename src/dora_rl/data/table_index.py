"""The table's metadata: which rows exist, who may read them, who has. No payload, locks or files.

Never waits and never touches a column's value. Invariants, for every consumer:
- a row is ready exactly when all columns the consumer needs are there and it has not taken it;
- a group is ready exactly when all its rows are there and ready;
- charged rows = live rows + rows still to come of the groups that have begun.
A row is dropped when every consumer has taken it and it was released, or when its group is dropped.

Every operation is split in `check_…`, which may refuse and changes nothing, and the change itself,
which cannot fail; a log record fits in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dora_rl.types import GroupId, Version


class TableError(Exception):
    """The table refused an operation; it is as it was before."""


@dataclass(slots=True)
class RowMeta:
    """What is known of one row. `missing[c]` counts the columns consumer c still lacks."""

    index: int
    group: GroupId
    version: Version
    sample: int
    num_tokens: int
    num_bytes: int
    columns: set[str]
    missing: list[int]
    taken: set[int] = field(default_factory=set[int])
    released: bool = False


@dataclass(slots=True)
class GroupMeta:
    """`rows` maps sample number to index. A dropped row stays in it until the whole group ends."""

    version: Version
    num_rows: int
    rows: dict[int, int]
    num_dropped: int
    num_ready: list[int]


class ReadyQueue:
    """Ready ids by version, lowest first. Ids that were taken meanwhile are skipped when met."""

    def __init__(self) -> None:
        self._live: dict[Version, set[int]] = {}
        self._heaps: dict[Version, list[int]] = {}
        self._version_of: dict[int, Version] = {}

    def __len__(self) -> int:
        return len(self._version_of)

    def __contains__(self, key: int) -> bool:
        return key in self._version_of

    def add(self, version: Version, key: int) -> None:
        assert key not in self._version_of
        self._version_of[key] = version
        self._live.setdefault(version, set()).add(key)
        heappush(self._heaps.setdefault(version, []), key)

    def discard(self, key: int) -> None:
        version = self._version_of.pop(key, None)
        if version is None:
            return
        live, heap = self._live[version], self._heaps[version]
        live.remove(key)
        if not live:
            del self._live[version], self._heaps[version]
        elif len(heap) > 2 * len(live) + 64:
            self._heaps[version] = sorted(live)  # a sorted list is a heap

    def count(self, versions: range | None) -> int:
        if versions is None:
            return len(self)
        return sum(len(live) for version, live in self._live.items() if version in versions)

    def first(self, limit: int, versions: range | None) -> list[int]:
        """Up to `limit` ids, oldest version first; they stay in the queue."""
        found: list[int] = []
        for version in sorted(self._heaps):
            if versions is None or version in versions:
                found += self._first_of(version, limit - len(found))
        return found

    def _first_of(self, version: Version, limit: int) -> list[int]:
        heap = self._heaps[version]
        found: list[int] = []
        while heap and len(found) < limit:
            key = heappop(heap)
            # An id that was discarded and added again stands in the heap twice.
            if self._version_of.get(key) == version and (not found or found[-1] != key):
                found.append(key)
        for key in found:
            heappush(heap, key)
        return found


class TableIndex:
    def __init__(self, consumers: Mapping[str, Sequence[str]], auto_release: bool) -> None:
        assert consumers, "a table needs at least one consumer"
        self.consumers = {name: tuple(dict.fromkeys(needs)) for name, needs in consumers.items()}
        self._numbers = {name: number for number, name in enumerate(self.consumers)}
        self._needed_by: dict[str, list[int]] = {}
        for name, needs in self.consumers.items():
            for column in needs:
                self._needed_by.setdefault(column, []).append(self._numbers[name])
        self._needs = [frozenset(needs) for needs in self.consumers.values()]
        self._auto_release = auto_release
        self.rows: dict[int, RowMeta] = {}
        self.groups: dict[GroupId, GroupMeta] = {}
        self._ready_rows = [ReadyQueue() for _ in self.consumers]
        self._ready_groups = [ReadyQueue() for _ in self.consumers]
        self.next_index = 0
        self.num_dropped = 0
        self.num_bytes = 0
        self.num_charged = 0

    # Questions

    def ready_rows(self, consumer: str) -> ReadyQueue:
        return self._ready_rows[self.number(consumer)]

    def ready_groups(self, consumer: str) -> ReadyQueue:
        return self._ready_groups[self.number(consumer)]

    def number(self, consumer: str) -> int:
        number = self._numbers.get(consumer)
        if number is None:
            raise TableError(f"no consumer {consumer!r}; the table has {list(self._numbers)}")
        return number

    def taken_by(self, consumer: str) -> list[int]:
        number = self.number(consumer)
        return [row.index for row in self.rows.values() if number in row.taken]

    def rows_of(self, group: GroupId, sample: int | None = None) -> list[int]:
        """Live rows of a group, by sample number; with `sample`, that one if it is here."""
        meta = self.groups.get(group)
        if meta is None:
            return []
        if sample is not None:
            index = meta.rows.get(sample)
            return [index] if index in self.rows else []
        return [index for _, index in sorted(meta.rows.items()) if index in self.rows]

    # Rows come

    def check_add(self, rows: Sequence[tuple[RowMeta, int]]) -> None:
        """Rows with the size of their group: do they agree with what is here and each other?"""
        seen: set[tuple[GroupId, int]] = set()
        kinds: dict[GroupId, tuple[Version, int]] = {}
        for row, num_in_group in rows:
            if not 0 <= row.sample < num_in_group:
                raise TableError(f"group {row.group}: sample {row.sample} of {num_in_group} rows")
            there = self.groups.get(row.group)
            kind = (row.version, num_in_group)
            if there is not None:
                kinds[row.group] = (there.version, there.num_rows)
            if kinds.setdefault(row.group, kind) != kind:
                raise TableError(
                    f"group {row.group}: (version, rows) is {kinds[row.group]}, not {kind}"
                )
            key = (row.group, row.sample)
            if key in seen or (there is not None and row.sample in there.rows):
                raise TableError(f"group {row.group}: sample {row.sample} is put a second time")
            seen.add(key)

    def add(self, row: RowMeta, num_in_group: int) -> None:
        """`row.index` is new; `row.missing` is filled in here."""
        assert row.index not in self.rows
        self.next_index = max(self.next_index, row.index + 1)
        group = self.groups.get(row.group)
        if group is None:
            group = GroupMeta(row.version, num_in_group, {}, 0, [0] * len(self.consumers))
            self.groups[row.group] = group
            self.num_charged += num_in_group
        group.rows[row.sample] = row.index
        row.released = row.released or self._auto_release
        row.missing = [len(needs - row.columns) for needs in self._needs]
        self.rows[row.index] = row
        self.num_bytes += row.num_bytes
        for number, missing in enumerate(row.missing):
            if not missing and number not in row.taken:
                self._set_ready(row, number)

    def begin_group(
        self, group: GroupId, version: Version, num_rows: int, dropped: Mapping[int, int]
    ) -> None:
        """A group some of whose rows came and went before (from a snapshot)."""
        meta = GroupMeta(version, num_rows, dict(dropped), len(dropped), [0] * len(self.consumers))
        self.groups[group] = meta
        self.num_charged += num_rows - len(dropped)

    def check_extend(self, index: int, columns: Iterable[str]) -> None:
        row = self._row(index)
        again = row.columns.intersection(columns)
        if again:
            raise TableError(f"row {index} already has {sorted(again)}; a value is written once")

    def extend(self, index: int, columns: Iterable[str], num_bytes: int, num_tokens: int) -> None:
        row = self.rows[index]
        row.num_bytes += num_bytes
        row.num_tokens += num_tokens
        self.num_bytes += num_bytes
        for column in columns:
            row.columns.add(column)
            for number in self._needed_by.get(column, ()):
                row.missing[number] -= 1
                if not row.missing[number]:
                    self._set_ready(row, number)

    # Rows go

    def check_take(self, consumer: str, indices: Iterable[int]) -> None:
        number = self.number(consumer)
        for index in indices:
            row = self._row(index)
            if number in row.taken:
                raise TableError(f"{consumer} has already taken row {index}")
            if row.missing[number]:
                lacks = [c for c in self.consumers[consumer] if c not in row.columns]
                raise TableError(f"row {index} is not ready for {consumer}: it lacks {lacks}")

    def take(self, consumer: str, indices: Iterable[int]) -> list[int]:
        """Mark as taken; returns the rows that were dropped by it."""
        number = self.number(consumer)
        dropped: list[int] = []
        for index in indices:
            row = self.rows[index]
            self._unset_ready(row, number)
            row.taken.add(number)
            dropped += self._drop_if_done(row)
        return dropped

    def check_untake(self, consumer: str, indices: Iterable[int]) -> None:
        number = self.number(consumer)
        for index in indices:
            if number not in self._row(index).taken:
                raise TableError(f"{consumer} has not taken row {index}")

    def untake(self, consumer: str, indices: Iterable[int]) -> None:
        number = self.number(consumer)
        for index in indices:
            row = self.rows[index]
            row.taken.remove(number)
            self._set_ready(row, number)

    def check_exist(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._row(index)

    def release(self, indices: Iterable[int]) -> list[int]:
        """Nobody will give these rows back; returns the rows that were dropped by it."""
        dropped: list[int] = []
        for index in indices:
            row = self.rows[index]
            row.released = True
            dropped += self._drop_if_done(row)
        return dropped

    def drop_group(self, group: GroupId) -> list[int]:
        """The group ended without being read (failed, filtered); its late rows start it anew."""
        meta = self.groups[group]
        indices = self.rows_of(group)
        for index in indices:
            row = self.rows[index]
            for number in range(len(self.consumers)):
                self._unset_ready(row, number)
            self._remove(row)
        if group in self.groups:  # rows were still to come
            del self.groups[group]
            self.num_charged -= meta.num_rows - meta.num_dropped
        return indices

    def _row(self, index: int) -> RowMeta:
        row = self.rows.get(index)
        if row is None:
            gone = index < self.next_index
            raise TableError(f"row {index} {'was dropped' if gone else 'does not exist'}")
        return row

    def _set_ready(self, row: RowMeta, number: int) -> None:
        group = self.groups[row.group]
        self._ready_rows[number].add(row.version, row.index)
        group.num_ready[number] += 1
        if group.num_ready[number] == group.num_rows:
            self._ready_groups[number].add(group.version, row.group)

    def _unset_ready(self, row: RowMeta, number: int) -> None:
        if row.index in self._ready_rows[number]:
            self._ready_rows[number].discard(row.index)
            self.groups[row.group].num_ready[number] -= 1
            self._ready_groups[number].discard(row.group)

    def _drop_if_done(self, row: RowMeta) -> list[int]:
        if not row.released or len(row.taken) < len(self.consumers):
            return []
        self._remove(row)
        return [row.index]

    def _remove(self, row: RowMeta) -> None:
        del self.rows[row.index]
        self.num_bytes -= row.num_bytes
        self.num_charged -= 1
        self.num_dropped += 1
        group = self.groups[row.group]
        group.num_dropped += 1
        if group.num_dropped == group.num_rows:
            del self.groups[row.group]

    def check_invariants(self) -> None:
        """Recount everything from the rows; for tests and after a restore."""
        live_of = dict.fromkeys(self.groups, 0)
        for row in self.rows.values():
            live_of[row.group] += 1
            for number in range(len(self.consumers)):
                ready = not row.missing[number] and number not in row.taken
                assert ready == (row.index in self._ready_rows[number]), row
        to_come = 0
        for key, group in self.groups.items():
            assert live_of[key] + group.num_dropped == len(group.rows)
            to_come += group.num_rows - len(group.rows)
            for number, num_ready in enumerate(group.num_ready):
                live = [self.rows[i] for i in group.rows.values() if i in self.rows]
                assert num_ready == sum(r.index in self._ready_rows[number] for r in live)
                assert (num_ready == group.num_rows) == (key in self._ready_groups[number])
        assert self.num_charged == len(self.rows) + to_come
        assert self.num_bytes == sum(row.num_bytes for row in self.rows.values())
