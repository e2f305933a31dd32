"""A model family of docs/extending.md in a copy of the package: one new file and one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.document_blocks import blocks_of
from tests.kit.places import ROOT


def run(command: list[str], folder: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(folder / "src")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_family_is_one_file_and_one_line(tmp_path: Path) -> None:
    blocks = blocks_of(ROOT / "docs" / "extending.md")
    family = next(b for b in blocks if b.saved_as.endswith("families/cwm.py"))
    check = next(b for b in blocks if b.saved_as == "check_cwm.py")
    (entry,) = (b for b in blocks if b.language == "bash" and "families/__init__.py" in b.text)
    package = tmp_path / "src" / "dora_rl"
    shutil.copytree(ROOT / "src" / "dora_rl", package, ignore=shutil.ignore_patterns("__pycache__"))
    before = {p: p.read_text() for p in package.rglob("*.py")}
    (tmp_path / family.saved_as).write_text(family.text)
    (tmp_path / check.saved_as).write_text(check.text)
    run(["bash", "-c", entry.text], tmp_path)
    changed = [p for p, text in before.items() if p.read_text() != text]
    assert changed == [package / "model" / "families" / "__init__.py"]
    old, new = (text.splitlines() for text in (before[changed[0]], changed[0].read_text()))
    assert len(new) == len(old) + 1 and [line for line in new if line in old] == old
    run([sys.executable, check.saved_as], tmp_path)
