"""Instances on a CPU let the learner go first."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dora_rl.setup import priority
from dora_rl.setup.priority import NICENESS

PROGRAM = """
import os
from dora_rl.setup.priority import AUTOGROUP, make_way
before = AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
make_way()
after = AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
print(os.getpriority(os.PRIO_PROCESS, 0), before.strip(), after.strip(), sep="|")
"""


def make_way_in(*, own_session: bool) -> tuple[int, str, str]:
    """The process's niceness, and what its group says before and after ("" where it has none)."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=own_session)
    assert done.returncode == 0, done.stderr
    niceness, before, after = done.stdout.strip("\n").split("|")
    return int(niceness), before, after


def test_a_session_of_its_own_makes_way_as_a_whole() -> None:
    niceness, before, after = make_way_in(own_session=True)
    assert niceness >= NICENESS
    if not before:
        pytest.skip("sessions are not weighed against each other here")
    assert after.split()[-1] == str(NICENESS)


def test_a_session_of_others_is_left_alone() -> None:
    niceness, before, after = make_way_in(own_session=False)
    assert niceness >= NICENESS and after == before


def test_a_kernel_that_is_asked_too_often_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[BaseException | None] = [BlockingIOError(), BlockingIOError(), None]
    written: list[str] = []

    class Busy:
        def exists(self) -> bool:
            return True

        def write_text(self, text: str) -> None:
            if (answer := answers.pop(0)) is not None:
                raise answer
            written.append(text)

    monkeypatch.setattr(priority, "AUTOGROUP", Busy())
    monkeypatch.setattr(priority, "PAUSE_S", 0.0)
    monkeypatch.setattr(priority.os, "nice", lambda _: 0)
    monkeypatch.setattr(priority.os, "getsid", lambda _: priority.os.getpid())
    priority.make_way()
    assert written == [str(NICENESS)] and not answers


def test_a_group_that_cannot_be_read_or_set_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some kernels have the file without a group in it, or forbid writing."""
    monkeypatch.setattr(priority, "AUTOGROUP", priority.AUTOGROUP.parent)  # a directory: OSError
    monkeypatch.setattr(priority.os, "nice", lambda _: 0)
    monkeypatch.setattr(priority.os, "getsid", lambda _: priority.os.getpid())
    priority.make_way()
