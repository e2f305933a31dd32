"""Control groups (version 2): the kernel's own bounds on all processes of a run together.

Used where they are there and may be written; `watch.Tree` does without. Groups are made beside the
one that we are in, or below it, whichever the machine allows; ours are named `dora-rl-PID-...`.
Never moves a process but those of runs. Invariant: a group that `find` gave was seen to bound
memory and processes; what earlier owners left behind is removed when the next one comes.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

from dora_rl.rewards.sandbox.limits import End, Limits

NEEDED = ("memory", "pids")
PREFIX = "dora-rl-"
REMOVE_S = 1.0


class Groups:
    """A group of our own, below which every run has one. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._left: list[Path] = []

    def make(self, limits: Limits) -> Group:
        # The pid, because a fork of ours counts from the same number.
        group = Group(self.root / f"run-{os.getpid()}-{next(self._numbers)}")
        group.limit(limits)
        return group

    def remove(self, group: Group) -> None:
        """Now, or later: what was killed is in the group until the kernel has buried it."""
        with self._lock:
            self._left = [path for path in [*self._left, group.path] if not _removed(path)]

    def close(self) -> None:
        end_s = time.monotonic() + REMOVE_S
        while not all(map(_removed, [*self._left, self.root])) and time.monotonic() < end_s:
            time.sleep(0.01)


class Group:
    """Of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def limit(self, limits: Limits) -> None:
        wanted = {
            "memory.max": limits.memory_total_bytes_max,
            "memory.swap.max": 0,
            "memory.oom.group": 1,
            "pids.max": limits.processes_max + 1,  # init counts too
        }
        for name, value in wanted.items():
            with suppress(FileNotFoundError):  # no swap on this machine
                (self.path / name).write_text(str(value))

    def take(self, pid: int) -> None:
        """The process, and everything it will start."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def passed(self, limits: Limits) -> End | None:
        """The bound that the run is over."""
        if _counts(self.path / "memory.events").get("oom_kill"):
            return End.MEMORY
        cpu_s = _counts(self.path / "cpu.stat").get("usage_usec", 0) / 1e6
        return End.CPU if cpu_s > limits.cpu_s else None


def find(membership: Path = Path("/proc/self/cgroup"), mounts: str = "") -> Groups | None:
    """A place for our groups, if there is one: beside our own group, or below it."""
    mount = _mount_point(mounts or Path("/proc/self/mountinfo").read_text())
    with suppress(OSError):
        lines = membership.read_text().splitlines()
        inside = next((line[3:] for line in lines if line.startswith("0::/")), None)
        if mount is None or inside is None:
            return None
        own = mount / inside.strip("/")
        parents = dict.fromkeys((own.parent if own != mount else own, own))
        return next(filter(None, map(_try, parents)), None)
    return None


def _mount_point(mounts: str) -> Path | None:
    parts = (line.partition(" - ") for line in mounts.splitlines())
    places = (Path(place.split()[4]) for place, _, kind in parts if kind.startswith("cgroup2 "))
    return next(places, None)


def _try(parent: Path) -> Groups | None:
    root = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        _bury(parent)
        root.mkdir()
    except OSError:
        return None
    groups = Groups(root)
    try:
        if set(NEEDED) <= set((root / "cgroup.controllers").read_text().split()):
            enabled = " ".join(f"+{name}" for name in NEEDED)
            (root / "cgroup.subtree_control").write_text(enabled)
            groups.remove(groups.make(Limits()))
            return groups
    except OSError:
        pass
    groups.close()
    return None


def _bury(parent: Path) -> None:
    """Empty groups of owners that are gone."""
    for root in parent.glob(f"{PREFIX}*"):
        pid = root.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            for path in (*root.glob("run-*"), root):
                _removed(path)


def _removed(path: Path) -> bool:
    """False while processes are in it."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _counts(path: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {name: int(value) for name, value in pairs}
