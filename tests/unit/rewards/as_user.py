"""The sandbox as another user of the machine has it: a process of that user's, and our end of it.

    python as_user.py PREFIX ...     (root) becomes another user that can read these directories

Only root can become another user. Directories that the other user could not reach are shown to it
in a mount namespace of its own.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora_rl.config import RewardConfig
from dora_rl.rewards.base import ScoreError, ScoreItem
from dora_rl.rewards.code import CodeReward
from dora_rl.rewards.sandbox import kernel
from dora_rl.rewards.sandbox.limits import Ask, Limits, Run
from dora_rl.types import UserError

USER = 54321  # of nobody on this machine


class OwnBox:
    """The sandbox of this process."""

    def __init__(self) -> None:
        self.reward = CodeReward(RewardConfig(timeout_s=60), wall_s=8, cpu_s=0.5)

    def run(self, code: str, asks: Sequence[Ask] = (), limits: Limits | None = None) -> Run:
        return self.reward.sandbox.run(code, asks=asks, limits=limits)

    def score(self, item: ScoreItem) -> float | ScoreError:
        return self.reward.score_one(item)

    def close(self) -> None:
        self.reward.close()


class UsersBox:
    """The same, in a process of another user."""

    def __init__(self) -> None:
        needed = [sys.base_prefix, str(Path(__file__).parent), *filter(os.path.isdir, sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *needed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(filter(None, sys.path))},
            cwd="/",
        )
        self.problem = self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        return pickle.load(self._process.stdout)

    def _ask(self, name: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        pickle.dump((name, arguments), self._process.stdin)
        self._process.stdin.flush()
        return self._receive()

    def run(self, code: str, asks: Sequence[Ask] = (), limits: Limits | None = None) -> Run:
        return self._ask("run", code, asks, limits)

    def score(self, item: ScoreItem) -> float | ScoreError:
        return self._ask("score", item)

    def close(self) -> None:
        self._process.communicate()


def become_user(needed: Sequence[str]) -> None:
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    hidden = {place: os.open(place, os.O_PATH) for place in needed if _barrier(place)}
    for place in sorted(hidden):
        barrier = _barrier(place)
        if barrier:
            kernel.mount("tmpfs", barrier, "tmpfs", 0, "mode=755")
    for place, fd in sorted(hidden.items()):
        if not os.path.exists(place):
            os.makedirs(place)
            kernel.mount(f"/proc/self/fd/{fd}", place, "", kernel.MS_BIND | kernel.MS_REC)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.execv(sys.executable, [sys.executable, __file__])


def _barrier(place: str) -> str:
    """The outermost directory on the way that others may not enter."""
    for parent in reversed((Path(place), *Path(place).parents)):
        if parent.is_dir() and not parent.stat().st_mode & 0o001:
            return str(parent)
    return ""


def serve() -> None:
    door = sys.stdout.buffer
    try:
        box = OwnBox()
    except UserError as error:
        pickle.dump(str(error), door)
        return
    pickle.dump("", door)
    door.flush()
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            box.close()
            return
        pickle.dump(getattr(box, name)(*arguments), door)
        door.flush()


if __name__ == "__main__":
    if sys.argv[1:]:
        become_user(sys.argv[1:])
    serve()
