"""The notebook of the documents, followed to its end as in a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.kit.places import ROOT

NOTEBOOKS = ROOT / "docs" / "notebooks"
DRIVER = Path(__file__).parent / "notebook_driver.py"


def test_the_first_training_learns(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(NOTEBOOKS / "first_training.ipynb")],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["done"] and found["heard"] == 12 and found["learned"] > 0
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_notebooks_are_kept_without_outputs() -> None:
    """What a run printed belongs to whoever ran it."""
    for path in NOTEBOOKS.glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None, path
