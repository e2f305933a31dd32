"""A machine that refuses (room, memory, a directory that is gone) stops a run in order, whoever
finds out first."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.store.table import TableError
from dora_rl.weights.store import WeightsCorrupt, WeightsFull
from dora_rl.worlds.local import LocalRun


def from_the_table(number: int) -> TableError:
    error = TableError("cannot write table.log; free some room")
    error.__cause__ = OSError(number, "no")
    return error


def run_that_raises(error: Exception, run_dir: Path, *, there: bool = True) -> Any:
    def stop(_: object) -> None:
        raise error

    lock = SimpleNamespace(is_there=lambda: there)
    return SimpleNamespace(run_dir=run_dir, lock=lock, stop=None, _start=lambda: None, _run=stop)


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


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "cannot fork")])
def test_low_memory_is_one_line(error: Exception, tmp_path: Path) -> None:
    stop = LocalRun.run(run_that_raises(error, tmp_path), lambda: False)
    assert not stop.done and stop.reason.startswith("out of memory")


def test_a_run_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    error = FileNotFoundError(errno.ENOENT, "no such file", "totals.tmp")
    stop = LocalRun.run(run_that_raises(error, tmp_path, there=False), lambda: False)
    assert not stop.done and "was deleted or moved while the run was going on" in stop.reason
