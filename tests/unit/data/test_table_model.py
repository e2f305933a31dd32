"""The table against a plain dictionary that knows the rules, under random operations."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dora_rl.data.table import NewRow, Table, TableError, TableFull

CONSUMERS: dict[str, tuple[str, ...]] = {"a": ("x",), "b": ("x", "y"), "c": ()}
GROUP_ROWS = 2
ROWS_MAX = 8
names = st.sampled_from(sorted(CONSUMERS))
groups = st.integers(0, 7)


@dataclass
class Oracle:
    """The rules of the table, slow and obvious."""

    group: int
    version: int
    sample: int
    columns: set[str]
    taken: set[str] = field(default_factory=set)
    released: bool = False


class TableMachine(RuleBasedStateMachine):
    @initialize(auto_release=st.booleans())
    def begin(self, auto_release: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.auto_release = auto_release
        self.rows: dict[int, Oracle] = {}
        self.put_samples: dict[int, set[int]] = {}
        self.num_put = 0
        self.open()

    def open(self) -> None:
        self.table = Table(
            CONSUMERS,
            rows_max=ROWS_MAX,
            auto_release=self.auto_release,
            path=self.directory / "table",
        )

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()
            shutil.rmtree(self.directory)

    # What the rules say

    def ready(self, consumer: str) -> list[int]:
        found = [
            (row.version, index)
            for index, row in self.rows.items()
            if consumer not in row.taken and set(CONSUMERS[consumer]) <= row.columns
        ]
        return [index for _, index in sorted(found)]

    def ready_groups(self, consumer: str) -> list[int]:
        ready = [self.rows[index] for index in self.ready(consumer)]
        complete = {
            (row.version, row.group)
            for row in ready
            if sum(other.group == row.group for other in ready) == GROUP_ROWS
        }
        return [group for _, group in sorted(complete)]

    def sweep(self) -> None:
        for index, row in list(self.rows.items()):
            if row.released and len(row.taken) == len(CONSUMERS):
                self.remove(index)

    def remove(self, index: int) -> None:
        group = self.rows.pop(index).group
        live = any(row.group == group for row in self.rows.values())
        if not live and len(self.put_samples[group]) == GROUP_ROWS:
            del self.put_samples[group]

    def num_charged(self) -> int:
        to_come = sum(GROUP_ROWS - len(samples) for samples in self.put_samples.values())
        return len(self.rows) + to_come

    # Operations

    @rule(group=groups, samples=st.sets(st.integers(0, 1), min_size=1), with_y=st.booleans())
    def put(self, group: int, samples: set[int], with_y: bool) -> None:
        columns = {"x": [group] * 3, **({"y": 1.0} if with_y else {})}
        version = group // 3
        new = [NewRow(group, version, columns, sample, GROUP_ROWS) for sample in sorted(samples)]
        known = group in self.put_samples
        try:
            indices = self.table.put(new)
        except TableFull:
            assert not known
            assert self.num_charged() + GROUP_ROWS > ROWS_MAX
            return
        except TableError:
            assert known and self.put_samples[group] & samples
            return
        assert indices == list(range(self.num_put, self.num_put + len(new)))
        assert known or self.num_charged() + GROUP_ROWS <= ROWS_MAX
        self.num_put += len(new)
        self.put_samples.setdefault(group, set()).update(samples)
        for index, row in zip(indices, new, strict=True):
            self.rows[index] = Oracle(
                group, version, row.sample, set(columns), released=self.auto_release
            )

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), column=st.sampled_from(["y", "z"]))
    def extend(self, data: st.DataObject, column: str) -> None:
        index = data.draw(st.sampled_from(sorted(self.rows)))
        try:
            self.table.extend({index: {column: 0.5}})
        except TableError:
            assert column in self.rows[index].columns
            return
        assert column not in self.rows[index].columns
        self.rows[index].columns.add(column)

    @rule(consumer=names, count=st.integers(1, 3))
    def take_rows(self, consumer: str, count: int) -> None:
        ready = self.ready(consumer)
        taken = [row.index for row in self.table.take(consumer, num_rows=count)]
        assert taken == (ready[:count] if len(ready) >= count else [])
        self.mark(consumer, taken)

    @rule(consumer=names, count=st.integers(1, 2), low=st.integers(0, 2))
    def take_groups(self, consumer: str, count: int, low: int) -> None:
        allowed = [g for g in self.ready_groups(consumer) if g // 3 >= low]
        rows = self.table.take(consumer, num_groups=count, versions=range(low, 9))
        expected = allowed[:count] if len(allowed) >= count else []
        assert [row.group for row in rows] == [g for g in expected for _ in range(GROUP_ROWS)]
        assert [row.sample for row in rows] == [0, 1] * len(expected)
        self.mark(consumer, [row.index for row in rows])

    @rule(consumer=names, group=groups)
    def take_group(self, consumer: str, group: int) -> None:
        ready = group in self.ready_groups(consumer)
        rows = self.table.take(consumer, group=group)
        assert len(rows) == (GROUP_ROWS if ready else 0)
        self.mark(consumer, [row.index for row in rows])

    def mark(self, consumer: str, indices: list[int]) -> None:
        for index in indices:
            self.rows[index].taken.add(consumer)
        self.sweep()

    @rule(consumer=names)
    def untake(self, consumer: str) -> None:
        taken = [i for i, row in self.rows.items() if consumer in row.taken]
        assert self.table.taken_by(consumer) == taken
        self.table.untake(consumer, taken)
        for index in taken:
            self.rows[index].taken.remove(consumer)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        indices = data.draw(st.sets(st.sampled_from(sorted(self.rows))))
        self.table.release(indices)
        for index in indices:
            self.rows[index].released = True
        self.sweep()

    @rule(group=groups)
    def drop(self, group: int) -> None:
        self.table.drop(group)
        for index in [i for i, row in self.rows.items() if row.group == group]:
            del self.rows[index]
        self.put_samples.pop(group, None)

    @rule()
    def checkpoint(self) -> None:
        self.table.checkpoint()

    @rule()
    def crash_and_restore(self) -> None:
        self.table.close()
        self.open()

    # What must hold

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_invariants()
        stats = self.table.stats()
        assert stats.num_put == self.num_put
        assert stats.num_rows == len(self.rows)
        for consumer in CONSUMERS:
            peeked = self.table.peek(consumer, num_rows=1000)
            assert [row.index for row in peeked] == self.ready(consumer)
            assert stats.num_ready_groups[consumer] == len(self.ready_groups(consumer))
        for row in self.table.read(self.rows):
            expected = self.rows[row.index]
            assert (row.group, row.version, row.sample) == (
                expected.group,
                expected.version,
                expected.sample,
            )
            assert row.columns.keys() == expected.columns
            assert row.columns["x"].tolist() == [row.group] * 3


TestTableModel = TableMachine.TestCase
TestTableModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
