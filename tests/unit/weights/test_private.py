"""Another user of the host: can neither read weights, nor plant any, nor hold up a run.

The other user is a real one, a process with another user id, where the tests run as root.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.config import WeightsConfig
from dora_rl.controller.run import Run
from dora_rl.types import UserError
from dora_rl.weights.leftovers import OWNER, claim, store_name, sweep
from dora_rl.weights.private import NotPrivate, private_folder
from dora_rl.weights.store import (
    ROOT_FILE,
    SHARED_MEMORY,
    SharedMemoryWeightStore,
    remember_root,
    shared_memory_root,
)
from tests.kit.inline_runs import config_of, proven, train

OTHER = 65534
needs_other = pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")

# What a hostile user does to a folder and everything in it whose name can be learned: lists, reads,
# locks, makes, replaces. It prints what worked.
HOSTILE = """
import fcntl, json, os, sys
worked = []
def attempt(what, act):
    try:
        act()
    except OSError:
        return
    worked.append(what)
def hold(path):
    handle = os.open(path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
for path in json.loads(sys.argv[1]):
    attempt("list " + path, lambda: os.listdir(path))
    attempt("read " + path, lambda: open(path, "rb").read(1))
    attempt("hold " + path, lambda: hold(path))
    attempt("write " + path, lambda: open(path, "ab").write(b"x"))
    attempt("make in " + path, lambda: os.mkdir(path + "/00000001"))
    attempt("remove " + path, lambda: os.unlink(path))
    attempt("move " + path, lambda: os.rename(path, path + "-gone"))
    attempt("open to all " + path, lambda: os.chmod(path, 0o777))
print(json.dumps(worked))
"""


def as_other(program: str, *arguments: str) -> str:
    """Run by the other user, with the system's own Python: ours may lie where it cannot come."""
    found = [one for one in ("/usr/bin/python3", sys.executable) if Path(one).exists()]
    for python in found:
        done = subprocess.run(
            [python, "-I", "-S", "-c", program, *arguments],
            user=OTHER,
            group=OTHER,
            extra_groups=[],
            capture_output=True,
            text=True,
            cwd="/",
        )
        if done.returncode == 0:
            return done.stdout
    pytest.skip("the other user has no Python here")


@pytest.fixture
def shared() -> Iterator[Path]:
    """Open to everybody, as /dev/shm is; what is there belongs to who made it."""
    folder = Path(tempfile.mkdtemp(dir=SHARED_MEMORY))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def everything(root: Path) -> list[str]:
    return [str(path) for path in [root, *root.rglob("*")]]


def publish(root: Path) -> SharedMemoryWeightStore:
    store = SharedMemoryWeightStore(root)
    store.publish(0, [("t", torch.ones(4))])
    return store


@needs_other
def test_another_user_comes_to_nothing_in_a_store(shared: Path) -> None:
    root = shared / "store"
    store = publish(root)
    os.close(claim(root))
    found = everything(root)
    assert any(path.endswith("model.safetensors") for path in found)
    worked = json.loads(as_other(HOSTILE, json.dumps(found)))
    assert worked == []
    store.publish(1, [("t", torch.zeros(4))])
    assert torch.equal(store.open(0).tensor("t"), torch.ones(4))


def test_a_store_is_closed_whatever_the_umask(shared: Path) -> None:
    before = os.umask(0)
    try:
        publish(shared / "store")
    finally:
        os.umask(before)
    for path in map(Path, everything(shared / "store")):
        mode = path.stat().st_mode & 0o777
        assert mode in ((0o700,) if path.is_dir() else (0o600, 0o400)), (path, oct(mode))


@needs_other
@pytest.mark.parametrize("inside", ["", "00000000", "00000000/model.safetensors"])
def test_what_another_user_owns_is_refused(shared: Path, inside: str) -> None:
    publish(shared / "store")
    os.chown(shared / "store" / inside, OTHER, OTHER)
    with pytest.raises(NotPrivate, match="belongs to user 65534"):
        SharedMemoryWeightStore(shared / "store").open(0)


def test_what_others_may_write_to_is_refused(shared: Path) -> None:
    publish(shared / "store")
    (shared / "store").chmod(0o770)
    with pytest.raises(NotPrivate, match="other users may write to it"):
        SharedMemoryWeightStore(shared / "store")


@pytest.mark.parametrize("inside", ["", "00000000", "00000000/model.safetensors"])
def test_a_link_is_not_followed(shared: Path, inside: str) -> None:
    publish(shared / "store")
    place = shared / "store" / inside
    place.rename(shared / "elsewhere")
    place.symlink_to(shared / "elsewhere")
    with pytest.raises(NotPrivate, match="symbolic link"):
        SharedMemoryWeightStore(shared / "store").open(0)


def test_a_folder_of_an_older_release_is_closed_to_others(shared: Path) -> None:
    (shared / "store").mkdir(mode=0o755)
    private_folder(shared / "store")
    assert (shared / "store").stat().st_mode & 0o777 == 0o700


@needs_other
def test_cleaning_up_touches_nothing_that_another_user_laid_there(
    shared: Path, tmp_path: Path
) -> None:
    """A planted store whose parts lead into ours: what they lead to is not removed."""
    mine, run_dir = tmp_path / "mine", tmp_path / "run"
    (mine / "thesis").mkdir(parents=True)
    (run_dir / "events").mkdir(parents=True)
    planted = shared / store_name("0000000000000000")
    planted.mkdir()
    (planted / "00000007").mkdir()
    (planted / OWNER).write_text(str(run_dir))
    (planted / "masters").symlink_to(mine)
    for path in (planted, planted / OWNER):
        os.chown(path, OTHER, OTHER)
    assert sweep(shared) == 0
    assert (mine / "thesis").is_dir() and planted.is_dir()


@needs_other
def test_a_name_that_another_user_has_taken_does_not_hold_up_a_resume(tmp_path: Path) -> None:
    """A name can be seen while a run lives; it may be gone when the run comes back."""
    root = shared_memory_root(WeightsConfig(), tmp_path)
    remember_root(tmp_path, root)
    as_other("import os, sys; os.mkdir(sys.argv[1])", str(root))
    try:
        other = shared_memory_root(WeightsConfig(), tmp_path)
        assert other not in (root, shared_memory_root(WeightsConfig(), tmp_path))
        publish(other)
        shutil.rmtree(other)
    finally:
        root.rmdir()


@needs_other
def test_another_user_cannot_hold_up_a_run(shared: Path) -> None:
    """It tries its hand at every file of the run and of its shared memory after the first step, in
    a run directory that everybody may look for."""
    run_dir = shared / "run"
    config = config_of(run_dir, weights={"root": ""}, orchestration={"num_steps": 3})
    tried: list[str] = []

    def hostile(run: Run) -> Callable[[], bool]:
        def look() -> bool:
            if run.state.committed == 1 and not tried:
                root = SHARED_MEMORY / json.loads((run_dir / ROOT_FILE).read_text())["name"]
                tried.extend([*everything(run_dir), *everything(root)])
                assert json.loads(as_other(HOSTILE, json.dumps(tried))) == []
            return False

        return look

    stop, _ = train(config, watch=hostile)
    assert stop.done and len(tried) > 20
    proven(run_dir)


@needs_other
@pytest.mark.parametrize("name", [".lock", ".learner-lock", "weights/.lock"])
def test_locks_in_a_run_directory_that_others_may_read_are_not_theirs(
    shared: Path, name: str
) -> None:
    run_dir = shared / "run"
    (run_dir / "weights").mkdir(parents=True, mode=0o755)
    (run_dir / name).touch()
    (run_dir / name).chmod(0o644)  # of an older release
    config, tried = config_of(run_dir, weights={"root": ""}), list[str]()

    def hostile(run: Run) -> Callable[[], bool]:
        def look() -> bool:
            if run.state.committed == 1 and not tried:
                tried.append(str(run_dir / name))
                assert json.loads(as_other(HOSTILE, json.dumps(tried))) == []
            return False

        return look

    stop, _ = train(config, watch=hostile)
    assert stop.done and tried
    with (run_dir / name).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_says_in_one_line_that_its_root_is_not_its_own(shared: Path) -> None:
    root = shared / "everybodys"
    root.mkdir()
    root.chmod(0o777)
    settings: dict[str, Any] = {"weights": {"root": str(root)}}
    with pytest.raises(UserError, match=f"cannot use {root}: other users may write to it"):
        train(config_of(shared / "run", **settings))
