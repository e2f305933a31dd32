"""A run that is killed between sealed and durable, with its host alive and without it.

The disk is held up from outside: whoever writes a version takes the lock of the store for a moment,
so a version that is sealed in shared memory is not on disk as long as somebody else has that lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.actions import End, EndGroup, Feed
from dora_rl.core.events import (
    LearnerJoined,
    Rewound,
    StepCommitted,
    StopRequested,
    VersionDurable,
)
from tests.kit.places import ROOT
from tests.kit.tiny_runs import TinyRun, finish, tiny_run, wait_until, workers_of

NUM_STEPS = 4


def events(run: TinyRun, kind: type) -> list[Any]:
    if not any((run.run_dir / "events").glob("*.jsonl")):
        return []
    return [entry.event for entry in run.entries() if isinstance(entry.event, kind)]


def kill_all(run: TinyRun, process: subprocess.Popen[str]) -> None:
    """Every process of the run at once, as far as that goes."""
    while found := workers_of(run.run_dir):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def killed_between(folder: Path, **settings: Any) -> TinyRun:
    """Version 1 is committed, requests have started on it, and the disk has version 0 alone."""
    shared = {"weights__root": str(folder / "shared"), "orchestration__num_steps": NUM_STEPS}
    run = tiny_run(folder, **(shared | settings))
    process = run.start()
    disk = run.run_dir / "weights"
    wait_until("version 0 on disk", lambda: versions(disk) == ["00000000"], process)
    with (disk / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait_until("a commit", lambda: bool(events(run, StepCommitted)), process)
        kill_all(run, process)
    assert versions(disk) == ["00000000"]
    assert all(event.version == 0 for event in events(run, VersionDurable))
    return run


def versions(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("0*"))


def audited(run: TinyRun) -> str:
    """By the command, with every file of the run."""
    command = [*run.command()[:3], "audit", str(run.run_dir), "--files"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    return finish(process)


LONG = [pytest.mark.full, pytest.mark.kills]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=LONG)])
def test_killed_between_sealed_and_durable_nothing_is_lost(tmp_path: Path, dtype: str) -> None:
    run = killed_between(tmp_path, trainer__compute_dtype=dtype)
    (committed,) = events(run, StepCommitted)
    run.train("--resume")
    assert not events(run, Rewound) and run.proven().figures.finished
    joined = list(events(run, LearnerJoined))[1]
    assert joined.version == joined.durable == 1, "finished before anything else"
    assert [event.step for event in events(run, StepCommitted)] == list(range(NUM_STEPS))
    fed = [a for entry in run.entries() for a in entry.actions if isinstance(a, Feed)]
    assert len({a.group for a in fed if a.step == 0}) == len([a for a in fed if a.step == 0])
    assert events(run, StepCommitted)[0] == committed and run.steps() == list(range(NUM_STEPS))
    audited(run)


def test_without_its_shared_memory_the_run_goes_back_to_the_last_durable_version(
    tmp_path: Path,
) -> None:
    """As after a reboot: what was on disk is there, what was in memory is not."""
    run = killed_between(tmp_path)
    shutil.rmtree(tmp_path / "shared")
    text = run.train("--resume", "logging.progress=true")
    assert "version 1 was lost" in text and "trains step 0 again" in text
    assert events(run, Rewound) == [Rewound(0)]
    report = run.proven()
    assert report.figures.finished and report.figures.num_rewound == 1
    assert [event.step for event in events(run, StepCommitted)] == [0, *range(NUM_STEPS)]
    actions = [action for entry in run.entries() for action in entry.actions]
    ends = [a for a in actions if isinstance(a, EndGroup)]
    assert len({a.group for a in ends}) == len(ends), "each group ended once"
    lost = [a for a in ends if a.end is End.LOST]
    assert all(a.version == 1 for a in lost) and report.figures.groups_lost == len(lost)
    first = {a.group for a in actions if isinstance(a, Feed) and a.step == 0}
    assert {a.group for a in ends if a.step == 0} == first, "trained again from the same samples"
    assert run.steps() == list(range(NUM_STEPS)), "each step stands in the metrics once"
    assert "1 times" in audited(run)


def test_a_stop_between_sealed_and_durable_is_no_finding(tmp_path: Path) -> None:
    """The step is committed, and its files tell of it; its groups end with the next start."""
    shared = {"weights__root": str(tmp_path / "shared"), "orchestration__num_steps": NUM_STEPS}
    run = tiny_run(tmp_path, **shared)
    process, disk = run.start(), run.run_dir / "weights"
    wait_until("version 0 on disk", lambda: versions(disk) == ["00000000"], process)
    with (disk / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait_until("a commit", lambda: bool(events(run, StepCommitted)), process)
        process.send_signal(signal.SIGINT)
        wait_until("the stop", lambda: bool(events(run, StopRequested)), process)
    process.communicate()
    assert not [e for e in events(run, VersionDurable) if e.version], "it was too early for that"
    command = [*run.command()[:3], "audit", str(run.run_dir), "--files"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert "no promise was broken so far" in done.stdout, done.stdout
    run.train("--resume")
    assert run.proven().figures.finished
    audited(run)
