"""Run directories that are foreign, moved or gone; disks and memory that refuse: one line each."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from dora_rl.cli import in_one_line, main
from dora_rl.controller.run_dir import RunLock
from dora_rl.io.system_errors import system_line
from dora_rl.types import UserError
from dora_rl.weights.run_models import FoundModel, export_model
from tests.kit.places import MODEL, ROOT

QUICKSTART = ROOT / "recipes" / "quickstart.toml"
HERE = [f"model.path={MODEL}", "rollout.num_instances=1"]


def dry_run(run_dir: Path, *more: str) -> int:
    return main(["train", str(QUICKSTART), *HERE, f"runtime.run_dir={run_dir}", "--dry-run", *more])


@pytest.mark.parametrize("name", ["thesis.tex", "data.json", "config.json"])
def test_a_foreign_folder_is_refused(tmp_path: Path, name: str, capsys) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / name).write_text("{}")
    assert dry_run(folder) == 2
    said = capsys.readouterr().err
    assert f"{folder} is not empty and not of a run (it has {name})" in said
    assert said.count("\n") == 1 and [path.name for path in folder.iterdir()] == [name]


@pytest.mark.parametrize("names", [(), ("train.log",), ("data.json", "logs"), (".gitkeep",)])
def test_an_empty_folder_and_one_of_an_early_end_are_taken(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in names:
        (folder / name).write_text('{"fingerprint": "f"}')
    assert dry_run(folder) == 0


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Path, Path]:
    """A run that began in `old` and lies in `new`."""
    old, new = tmp_path / "old", tmp_path / "new"
    (new / "events").mkdir(parents=True)
    (new / "events" / "000000000000.jsonl").touch()
    config = {"model": {"path": str(MODEL)}, "runtime": {"run_dir": str(old)}}
    (new / "config.json").write_text(json.dumps(config))
    return old, new


def test_a_moved_run_gets_the_advice_that_helps(moved: tuple[Path, Path], capsys) -> None:
    old, new = moved
    assert main(["train", str(new / "config.json"), "--resume"]) == 2
    said = capsys.readouterr().err
    assert f"{new} holds a run that began in {old}" in said
    assert f"add runtime.run_dir={new}" in said and "leave --resume out" not in said


def test_a_copied_run_is_not_taken_for_the_original(moved: tuple[Path, Path], capsys) -> None:
    old, new = moved
    shutil.copytree(new, old)
    assert main(["train", str(new / "config.json"), "--resume"]) == 2
    assert f"add runtime.run_dir={new}" in capsys.readouterr().err


def test_following_the_advice_gets_past_it(moved: tuple[Path, Path], capsys) -> None:
    _, new = moved
    config = str(new / "config.json")
    assert main(["train", config, "--resume", f"runtime.run_dir={new}", "--dry-run"]) == 2
    assert "runtime.run_dir" not in capsys.readouterr().err  # this bare run has no reward


def test_export_to_a_read_only_disk_is_one_line(tmp_path: Path) -> None:
    out = Path("/sys/dora-rl-export")  # sysfs takes no directories, of root either
    with pytest.raises(UserError, match=r"cannot write /sys/dora-rl-export \(.*\); choose another"):
        export_model(FoundModel("m", 0, MODEL), out)
    assert not out.exists()


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(MODEL, broken)
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError):
        export_model(FoundModel("m", 0, broken), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "out of memory; end other programs"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory ("),
        (OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), "out of memory (CUDA out of"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "out of memory ("),
        (RuntimeError("can't start new thread"), "out of memory ("),
        (OSError(errno.EROFS, "ro", "/mnt/x"), "cannot use /mnt/x: Read-only file system;"),
        (PermissionError(errno.EACCES, "no", "/mnt/x"), "cannot use /mnt/x: Permission denied;"),
        (RuntimeError("Error while serializing: I/O error: (os error 30)"), "Read-only file"),
    ],
)
def test_what_the_machine_refuses_is_one_line(error: Exception, says: str, capsys) -> None:
    def work() -> int:
        raise error

    assert in_one_line(work, debug=False) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    with pytest.raises(type(error)):
        in_one_line(work, debug=True)


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    def work() -> int:
        raise FileNotFoundError(errno.ENOENT, "no such file", "x")

    assert system_line(ValueError("28")) is None
    assert system_line(RuntimeError("it ended with code: 13")) is None
    with pytest.raises(FileNotFoundError):
        in_one_line(work, debug=False)


def test_the_lock_knows_that_its_directory_is_gone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    lock = RunLock(run_dir)
    assert lock.is_there()
    shutil.rmtree(run_dir)
    assert not lock.is_there()
    run_dir.mkdir()  # another one of the same name
    (run_dir / ".lock").touch()
    assert not lock.is_there()
    os.close(lock.fd)
