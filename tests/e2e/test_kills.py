"""`make chaos` in short: a few real kills, and the program finds what was broken on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import chaos
from tests.kit.places import ROOT
from tests.kit.tiny_runs import RUN_S_MAX

pytestmark = pytest.mark.full


@pytest.mark.kills
def test_ten_kills(tmp_path: Path) -> None:
    seed = os.environ.get("CHAOS_SEED", str(time.time_ns() % 100_000))
    out = tmp_path / "kills.json"
    words = ["--kills", "10", "--per-run", "5", "--seed", seed, "--json", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert len(found["kills"]) == 10 and str(found["seed"]) == seed


def test_what_is_lost_twice_or_left_behind_is_found(tmp_path: Path) -> None:
    """The checks of the program, on a run that is right and is then made wrong."""
    run = chaos.Victim(tmp_path, chaos.CHAINS, tmp_path / "said.log")
    try:
        assert run.moves_on(30)
        run.finish()
    finally:
        run.process.kill()
        run.process.wait()
    chaos.check(run)
    (run.temporary / "forgotten").touch()
    with pytest.raises(chaos.Found, match=r"left behind: .*forgotten"):
        chaos.check(run)
    (run.temporary / "forgotten").unlink()
    rows = run.run_dir / "rollouts.jsonl"
    text = rows.read_text()
    rows.write_text(text + text.splitlines()[0] + "\n")
    with pytest.raises(chaos.Found, match="trained twice"):
        chaos.check(run)
    rows.write_text("".join(text.splitlines(keepends=True)[:-4]))
    with pytest.raises(chaos.Found, match=r"rollouts\.jsonl differ"):
        chaos.check(run)
    rows.write_text(text)
    weights = run.run_dir / "weights" / f"{run.num_steps:08d}" / "model.safetensors"
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(Exception, match=r"checksum|audit"):
        chaos.check(run)
