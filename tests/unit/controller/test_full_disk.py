"""A machine that refuses (room, memory, a directory that is gone) stops a run in order, whoever
finds out first."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, cast

import pytest

from dora_rl.controller.loop import Control
from dora_rl.controller.run import Run
from dora_rl.setup.layout import plan_layout
from dora_rl.store.table import TableError
from dora_rl.weights.store import WeightsCorrupt, WeightsFull
from dora_rl.worlds.local import OneHost
from tests.kit.fakes import Console, config_of, files_of


def from_the_table(number: int) -> TableError:
    error = TableError("cannot write table.log; free some room")
    error.__cause__ = OSError(number, "no")
    return error


class Refuses(OneHost):
    """A world in which nothing can be started."""

    def __init__(self, error: Exception, lock: Path | None) -> None:
        super().__init__()
        self._error, self._lock = error, lock

    def begin(self, read: object) -> None:
        del read
        if self._lock is not None:
            self._lock.unlink()
        raise self._error


def run_that_raises(error: Exception, run_dir: Path, *, there: bool = True) -> Run:
    config, console = config_of(run_dir), Console()
    files = files_of(config, console)
    world = Refuses(error, None if there else run_dir / ".lock")
    control, nothing = Control(files.state), cast(Any, None)
    parts = (nothing, nothing, nothing, nothing)  # inbox, workers, staff, kept versions
    return Run(config, plan_layout(config, "cpu"), control, files, world, *parts, console)


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
    stop = run.run(lambda: False)
    assert not stop.done and "no room" in stop.reason


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
        run_that_raises(error, tmp_path).run(lambda: False)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "cannot fork")])
def test_low_memory_is_one_line(error: Exception, tmp_path: Path) -> None:
    stop = run_that_raises(error, tmp_path).run(lambda: False)
    assert not stop.done and stop.reason.startswith("out of memory")


def test_a_run_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    error = FileNotFoundError(errno.ENOENT, "no such file", "totals.tmp")
    stop = run_that_raises(error, tmp_path, there=False).run(lambda: False)
    assert not stop.done and "was deleted or moved while the run was going on" in stop.reason
