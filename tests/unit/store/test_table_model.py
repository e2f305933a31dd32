"""The table against a plain dictionary, under random operations and restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dora_rl.store.table import Row, Table, TableError, peek
from dora_rl.types import RequestId

requests = st.builds(RequestId, st.integers(0, 4), st.integers(0, 1))


class TableMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.rows: dict[RequestId, tuple[int, dict[str, float]]] = {}
        self.open()

    def open(self) -> None:
        self.table = Table(self.directory / "table")

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()
            shutil.rmtree(self.directory)

    @rule(chosen=st.sets(requests, min_size=1), version=st.integers(0, 3), x=st.floats(0, 1))
    def put(self, chosen: set[RequestId], version: int, x: float) -> None:
        self.table.put([Row(request, version, {"x": x}) for request in sorted(chosen)])
        self.rows.update({request: (version, {"x": x}) for request in chosen})

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), column=st.sampled_from(["y", "z"]))
    def extend(self, data: st.DataObject, column: str) -> None:
        request = data.draw(st.sampled_from(sorted(self.rows)))
        columns = self.rows[request][1]
        try:
            self.table.extend(request, {column: 0.5})
        except TableError:
            assert column in columns
            return
        assert column not in columns
        self.rows[request] = (self.rows[request][0], columns | {column: 0.5})

    @rule(group=st.integers(0, 4))
    def drop(self, group: int) -> None:
        self.table.drop(group)
        self.rows = {request: row for request, row in self.rows.items() if request.group != group}

    @rule()
    def crash_and_restore(self) -> None:
        self.table.close()
        self.open()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        assert set(self.table.groups()) == {request.group for request in self.rows}
        found = [row for group in self.table.groups() for row in self.table.read(group)]
        assert {row.request: (row.version, row.columns) for row in found} == self.rows
        for request, (_, columns) in self.rows.items():
            seen = peek(self.directory / "table", request)
            assert seen is not None and seen["x"] == columns["x"]


TestTableModel = TableMachine.TestCase
TestTableModel.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
