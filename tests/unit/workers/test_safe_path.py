"""Workers never import from the current directory; what the user names is found all the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dora_rl
from dora_rl.user_code import leave_out, load_object

SRC = Path(dora_rl.__file__).parent
PLANTED = ("json", "select", "numpy", "torch", "dora_rl", "msgspec", "reward_libs")
TRAP = "open({mark!r}, 'a').write('imported')\n"

START = """
import json, sys
from pathlib import Path
from dora_rl.config import RunConfig
from dora_rl.workers.messages import Ready
from dora_rl.workers.pool import LocalProcesses, WorkerPool

folder, spec, forks = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "forks"
config = RunConfig.model_validate({"model": {"path": "x"}, "reward": {"functions": [spec]}})

class Fresh(LocalProcesses):
    def _fork(self, name, log):
        return None

processes = (LocalProcesses if forks else Fresh)(folder)
pool = WorkerPool(config, folder, processes)
pool.start("reward", "reward0", {"base_dir": str(folder / "configs")})
print(type(pool.inbox.get(timeout=120).message).__name__)
pool.end(5.0)
"""


@pytest.mark.parametrize("forks", ["forks", "fresh"])
@pytest.mark.parametrize("spec", ["mine.py:score", "beside:score", "on_the_path:score"])
def test_a_worker_does_not_import_what_lies_in_the_current_directory(
    tmp_path: Path, forks: str, spec: str
) -> None:
    here, mark = tmp_path / "here", tmp_path / "mark"
    here.mkdir()
    for name in PLANTED:
        (here / f"{name}.py").write_text(TRAP.format(mark=str(mark)))
    code = "def score(completion, **columns):\n    return 1.0\n"
    for place in ("configs/mine.py", "configs/beside.py", "library/on_the_path.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(code)
    path = f"{SRC.parent}{os.pathsep}{tmp_path / 'library'}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", START, str(tmp_path), spec, forks],
        cwd=here,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    log = (tmp_path / "logs" / "reward0.log").read_text()
    assert done.stdout.split() == ["Ready"], done.stderr + log
    assert not mark.exists(), "something of the current directory was imported"


def test_every_child_that_is_an_interpreter_of_ours_is_started_so() -> None:
    wrong: list[str] = []
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text()
        for found in re.finditer(r"\[\s*sys\.executable,\s*(\S+)", text):
            if found[1] not in ('"-P",', '"-I",'):
                wrong.append(f"{path.relative_to(SRC)}: {found[0]}")
    assert not wrong


def test_a_module_that_is_installed_opens_no_other_directory(tmp_path: Path) -> None:
    load_object("dora_rl.data.chains:reward", tmp_path, section="reward", key="x")
    assert str(tmp_path) not in sys.path
    (tmp_path / "where_it_was_started.py").write_text("def score(): ...\n")
    load_object("where_it_was_started:score", tmp_path, section="reward", key="x")
    assert sys.path[-1] == str(tmp_path), "last, so that it shadows nothing"
    sys.path.remove(str(tmp_path))


def test_a_directory_is_left_out_unless_the_user_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = str(tmp_path)
    monkeypatch.chdir(tmp_path)
    for asked, stays in (("", False), ("/other", False), (f"/other{os.pathsep}{here}", True)):
        monkeypatch.setattr(sys, "path", ["/first", here, "/last"])
        monkeypatch.setenv("PYTHONPATH", asked)
        leave_out(here)
        assert sys.path == (["/first", here, "/last"] if stays else ["/first", "/last"])
