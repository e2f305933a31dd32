"""A disk without room stops a run in order, whoever finds out first."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.data.table_index import TableError
from dora_rl.runtime.local import LocalRun
from dora_rl.runtime.weights import WeightsCorrupt, WeightsFull


def from_the_table(number: int) -> TableError:
    error = TableError("cannot write table.log; free some room")
    error.__cause__ = OSError(number, "no")
    return error


def run_that_raises(error: Exception, run_dir: Path) -> Any:
    def stop(_: object) -> None:
        raise error

    return SimpleNamespace(run_dir=run_dir, stop=None, _start=lambda: None, _run=stop)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "no", "events/000000000000.jsonl"),
        OSError(errno.EDQUOT, "no"),
        from_the_table(errno.ENOSPC),
        WeightsFull("no room in shared memory"),
    ],
)
def test_a_run_stops_and_can_go_on(error: Exception, tmp_path: Path) -> None:
    run = run_that_raises(error, tmp_path)
    stop = LocalRun.run(run, lambda: False)
    assert stop is run.stop and not stop.done and "no room" in stop.reason


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "no"),
        from_the_table(errno.EIO),
        TableError("the table refused it"),
        WeightsCorrupt("damaged"),
        ValueError("No space left on device"),
    ],
)
def test_other_errors_are_not_taken_for_it(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        LocalRun.run(run_that_raises(error, tmp_path), lambda: False)
