"""Every page is followed: its blocks run in order in a fresh copy of what a reader has.

What differs from a reader's session is in `document_stand_in.py`. Blocks that need a GPU, a
cluster, the network or a long time are not run; `test_documents.py` checks those for syntax.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.docs.document_blocks import Block, blocks_of, given_runs, pages, shown
from tests.docs.document_driver import STAYING, end_what_stays
from tests.kit.places import ROOT

HERE = Path(__file__).parent
COPIED = ("recipes", "benchmarks", "src")
PAGE_S_MAX = 400.0

pytestmark = pytest.mark.full


def runnable(path: Path) -> list[Block]:
    return [block for block in blocks_of(path) if block.is_code and not block.needs]


@pytest.fixture(scope="session")
def path_with_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PATH with `dora-rl` and `python` in it."""
    folder = tmp_path_factory.mktemp("bin")
    stand_in = HERE / "document_stand_in.py"
    for name, target in (("dora-rl", f"{sys.executable} {stand_in}"), ("python", sys.executable)):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {target} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.fixture(scope="session")
def environment(path_with_program: Path) -> dict[str, str]:
    folders = [str(path_with_program), str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.environ | {
        "PATH": os.pathsep.join(folders),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }


def fresh(folder: Path) -> Path:
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """One short run of the quick start, for the pages that begin with a finished one."""
    folder = fresh(tmp_path_factory.mktemp("finished") / "reader")
    command = ["dora-rl", "train", "recipes/quickstart.toml"]
    status, said = run_whole(command, folder, environment)
    assert status == 0, said
    return folder / "runs" / "quickstart"


@pytest.mark.parametrize("page", [path for path in pages() if runnable(path)], ids=shown)
def test_a_page_does_what_it_says(
    page: Path, tmp_path: Path, environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    folder = fresh(tmp_path / "reader")
    for name in given_runs(page.read_text()):
        shutil.copytree(request.getfixturevalue("finished_run"), folder / name)
    blocks = [
        asdict(block) | {"place": block.place, "saved_as": block.saved_as}
        for block in runnable(page)
    ]
    (tmp_path / "blocks.json").write_text(json.dumps(blocks))
    command = [sys.executable, str(HERE / "document_driver.py"), str(tmp_path / "blocks.json")]
    status, said = run_whole(command, folder, environment)
    assert status == 0, said[-6000:]


def run_whole(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command in a session of its own; when its time is up, nothing of it stays behind."""
    log = folder.parent / "said.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {"PYTHONPATH": str(folder / "src")},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        status = process.wait(PAGE_S_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        end_what_stays(folder / STAYING)
    return status, log.read_text()
