"""Instances on a CPU let the learner go first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl.runtime.priority import AUTOGROUP, NICENESS

PROGRAM = """
import os
from dora_rl.runtime.priority import AUTOGROUP, make_way
make_way()
print(os.getpriority(os.PRIO_PROCESS, 0))
print(AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else "none")
"""


def niceness_of(**options: bool) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")
def test_a_session_of_its_own_makes_way_as_a_whole() -> None:
    own, group = niceness_of(start_new_session=True)
    assert own >= NICENESS and group == NICENESS


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")
def test_a_session_of_others_is_left_alone() -> None:
    before = int(Path("/proc/self/autogroup").read_text().split()[-1])
    own, group = niceness_of()
    assert own >= NICENESS and group == before
