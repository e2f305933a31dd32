"""Shared memory of dead runs is given back, that of living ones is not touched."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dora_rl.weights.leftovers import KEEP_S, OWNER, claim, store_name, sweep, transfer_of
from dora_rl.weights.versions import Versions

HOLD = """
import sys
from pathlib import Path
from dora_rl.weights.leftovers import claim
claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def make_store(folder: Path, run: str, num_bytes: int = 0) -> Path:
    root = folder / store_name(run)
    (root / "00000000").mkdir(parents=True)
    (root / "00000000" / "tensors").write_bytes(b"x" * num_bytes)
    transfer_of(root).mkdir()
    return root


def holder_of(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(root)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_a_store_goes_when_its_run_was_killed_and_not_before(tmp_path: Path) -> None:
    root, bystander = make_store(tmp_path, "one", 1000), make_store(tmp_path, "two")
    holder = holder_of(root)
    assert sweep(tmp_path) == 0 and root.exists()
    holder.kill()
    holder.wait()
    assert sweep(tmp_path) >= 1000
    assert not root.exists() and not transfer_of(root).exists()
    assert bystander.exists(), "nobody has claimed it yet: a run that is just beginning"
    assert sweep(tmp_path) == 0


def test_a_claim_that_meets_a_sweep_begins_again(tmp_path: Path) -> None:
    root = make_store(tmp_path, "one")
    os.close(claim(root))
    sweeper = os.open(root / OWNER, os.O_RDWR)
    fcntl.flock(sweeper, fcntl.LOCK_EX)
    claimed: list[int] = []
    thread = threading.Thread(target=lambda: claimed.append(claim(root)))
    thread.start()  # waits for the lock of a file that is about to go
    (root / OWNER).unlink()
    os.close(sweeper)
    thread.join(30)
    assert claimed and sweep(tmp_path) == 0 and (root / OWNER).exists()
    os.close(claimed[0])
    sweep(tmp_path)
    assert not root.exists()


def test_several_may_hold_one_store(tmp_path: Path) -> None:
    root = make_store(tmp_path, "one")
    first, second = claim(root), claim(root)
    os.close(first)
    assert sweep(tmp_path) == 0 and root.exists()
    os.close(second)


def test_a_run_gives_its_shared_memory_back_and_keeps_its_disk(tmp_path: Path) -> None:
    versions, disk = Versions(tmp_path, tmp_path / "shared"), tmp_path / "weights"
    versions.hold()
    versions.release()
    assert not (tmp_path / "shared").exists() and disk.exists()
    same = Versions(tmp_path, disk)  # a machine without shared memory
    same.hold()
    same.release()
    assert disk.exists()


@pytest.mark.parametrize("gone", ["run", "shared"])
def test_a_run_whose_directory_was_deleted_gives_its_shared_memory_back(
    tmp_path: Path, gone: str
) -> None:
    versions = Versions(tmp_path / "run", tmp_path / "shared")
    versions.hold()
    shutil.rmtree(tmp_path / gone)
    versions.release()
    assert not (tmp_path / "shared").exists()


def killed_run(tmp_path: Path) -> tuple[Path, Path]:
    """Versions 0 to 2 in shared memory with masters of the last, 0 and 1 on disk."""
    run_dir, root = tmp_path / "run", make_store(tmp_path, "one")
    for folder in ("00000001", "00000002", "masters/00000002"):
        (root / folder).mkdir(parents=True)
        (root / folder / "tensors").write_bytes(b"x" * 1000)
    for folder in ("events", "weights/00000000", "weights/00000001"):
        (run_dir / folder).mkdir(parents=True)
    os.close(claim(root, run_dir))
    return run_dir, root


def left(root: Path) -> list[str]:
    found = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_dir()]
    return sorted(found)


def test_what_a_killed_run_has_in_shared_memory_alone_stays(tmp_path: Path) -> None:
    """It can still be resumed without a loss; the rest is given back at once."""
    _, root = killed_run(tmp_path)
    assert sweep(tmp_path) >= 1000
    assert left(root) == ["00000002", "masters", "masters/00000002"]
    assert not transfer_of(root).exists()
    assert sweep(tmp_path) == 0 and (root / OWNER).exists(), "and the next one finds it so"


def test_it_goes_when_the_disk_has_it_or_the_run_is_gone_or_it_is_old(tmp_path: Path) -> None:
    run_dir, root = killed_run(tmp_path)
    (run_dir / "weights" / "00000002").mkdir()
    sweep(tmp_path)
    assert not root.exists()
    shutil.rmtree(run_dir)
    run_dir, root = killed_run(tmp_path)
    shutil.rmtree(run_dir)
    sweep(tmp_path)
    assert not root.exists()
    run_dir, root = killed_run(tmp_path)
    sweep(tmp_path, time.time() + KEEP_S + 60)
    assert not root.exists()
