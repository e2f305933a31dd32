"""Control groups: found where they may be written, told the limits, and removed; fakes are trees
of plain files, and where this machine has the real ones, the sandbox runs under them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl.rewards.sandbox import cgroup
from dora_rl.rewards.sandbox.box import Sandbox
from dora_rl.rewards.sandbox.cgroup import Group, Groups
from dora_rl.rewards.sandbox.limits import End, Limits
from dora_rl.rewards.sandbox.watch import Meter

LIMITS = Limits(
    memory_bytes_max=256 << 20,
    memory_total_bytes_max=300 << 20,
    processes_max=8,
    wall_s=30,
    cpu_s=2,
)


def files(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir() if file.is_file()}


def test_a_group_is_told_the_limits_and_given_the_process(tmp_path: Path) -> None:
    group = Groups(tmp_path).make(LIMITS)
    group.take(4711)
    assert files(group.path) == {
        "memory.max": str(300 << 20),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "9",
        "cgroup.procs": "4711",
    }


@pytest.mark.parametrize(
    ("events", "usage_usec", "end"),
    [
        ("oom 0\noom_kill 0\n", 1_999_999, None),
        ("oom 1\noom_kill 1\n", 0, End.MEMORY),
        ("oom_kill 0\n", 2_000_001, End.CPU),
    ],
)
def test_what_a_group_says_of_its_run(
    events: str, usage_usec: int, end: End | None, tmp_path: Path
) -> None:
    group: Meter = Group(tmp_path / "run")
    (tmp_path / "run" / "memory.events").write_text(events)
    (tmp_path / "run" / "cpu.stat").write_text(f"usage_usec {usage_usec}\nuser_usec 0\n")
    assert group.passed(LIMITS) is end


def test_a_group_that_still_has_processes_is_removed_later(tmp_path: Path) -> None:
    groups = Groups(tmp_path / "root")
    groups.root.mkdir()
    busy, free = Group(groups.root / "busy"), Group(groups.root / "free")
    (busy.path / "process").touch()
    groups.remove(busy)
    assert busy.path.exists()
    (busy.path / "process").unlink()
    groups.remove(free)
    assert not busy.path.exists() and not free.path.exists()
    groups.close()
    assert not groups.root.exists()


def membership(tmp_path: Path, line: str) -> Path:
    path = tmp_path / "membership"
    path.write_text(line)
    return path


@pytest.mark.parametrize("line", ["8:pids:/\n", "0::/deep/inside\n"])
def test_none_where_nothing_can_be_made(line: str, tmp_path: Path) -> None:
    """Version 1 alone, or a tree in which a directory has no `cgroup.controllers`."""
    (tmp_path / "cgroups" / "deep" / "inside").mkdir(parents=True)
    mounts = f"30 23 0:26 / {tmp_path}/cgroups rw - cgroup2 cgroup2 rw\n"
    assert cgroup.find(membership(tmp_path, line), mounts) is None
    assert not list(tmp_path.rglob("dora-rl-*"))


def test_none_without_a_mount(tmp_path: Path) -> None:
    mounts = "30 23 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    assert cgroup.find(membership(tmp_path, "0::/\n"), mounts) is None


def test_what_dead_owners_left_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    left = tmp_path / f"dora-rl-{dead.pid}-ab12" / "run-0"
    own = tmp_path / f"dora-rl-{os.getpid()}-ab12" / "run-0"
    for path in (left, own):
        path.mkdir(parents=True)
    mounts = f"30 23 0:26 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    assert cgroup.find(membership(tmp_path, "0::/\n"), mounts) is None
    assert not left.parent.exists() and own.exists()


def test_a_real_group_counts_the_time_of_what_has_ended() -> None:
    """Needs version 2 mounted and writable, but none of its controllers."""
    mounts = Path("/proc/self/mountinfo").read_text()
    mount = cgroup._mount_point(mounts)
    if mount is None or not os.access(mount, os.W_OK) or os.geteuid() != 0:
        pytest.skip("no version 2 control groups that we may write")
    groups = Groups(mount / f"{cgroup.PREFIX}{os.getpid()}-test")
    groups.root.mkdir()
    group = Group(groups.root / "run")
    try:
        spend = "import time\ninput()\nwhile time.process_time() < 0.3: pass"
        with subprocess.Popen([sys.executable, "-c", spend], stdin=subprocess.PIPE) as child:
            group.take(child.pid)
            child.communicate(b"\n")
        assert group.passed(Limits(cpu_s=0.2)) is End.CPU
        assert group.passed(Limits(cpu_s=60)) is None
    finally:
        groups.remove(group)
        groups.close()
    assert not groups.root.exists()


@pytest.fixture(scope="module")
def grouped() -> Sandbox:
    made = Sandbox()
    if "a control group" not in made.describe():
        made.close()
        pytest.skip("no version 2 control groups with memory and pids that we may write")
    return made


def test_real_groups_bound_all_processes_together(grouped: Sandbox) -> None:
    many = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        break
x = bytearray(b"x") * (100 << 20)
time.sleep(60)
"""
    assert grouped.run(many, limits=LIMITS).end is End.MEMORY
    spent = "import os\nfor _ in range(9):\n    if os.fork() == 0:\n        while True: pass\n"
    assert grouped.run(spent + "os.wait()", limits=LIMITS).end in (End.CPU, End.FAILED)
    assert grouped.run("print(1)", limits=LIMITS).stdout == "1\n"
    groups = grouped._groups
    grouped.close()
    assert groups is not None and not groups.root.exists()
