"""`dora-rl bench paradigms` for real: two modes, one ablation folder, table, figures, picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl.cli import main
from tests.kit.places import ROOT

SMALL = [
    f"model.path={ROOT / 'recipes' / 'models' / 'tiny'}",
    "rollout.num_samples=2",
    "rollout.tokens_max=64",
    "rollout.kv_bytes_max=16777216",
    "orchestration.batch_groups=2",
    "orchestration.inflight_groups=4",
    "orchestration.max_staleness=1",
]


@pytest.mark.full
def test_two_modes_are_trained_measured_and_drawn(tmp_path, capsys):
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    argv = ["bench", "paradigms", str(ROOT / "recipes" / "longtail.toml"), *SMALL]
    argv += ["--modes", "sync,multi_version", "--steps", "6", "--split", "1x1+1"]
    argv += ["--eval-prompts", "8", "--runs", str(tmp_path / "runs")]
    assert main([*argv, "--json", str(out), "--picture", str(picture)]) == 0
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert rows.keys() == {"sync", "multi_version"}
    for row in rows.values():
        assert row["mean"]["tokens_per_s"] > 0
        assert row["mean"]["discarded_tokens"] == 0
        assert row["mean"]["mixed_version_frac"] == 0
        assert row["mean"]["length_bias"] == pytest.approx(1.0)
        assert 0 <= row["mean"]["eval_greedy"] <= 1
        assert {"controller", "learner", "instance0"} <= row["runs"][0]["cores_used"].keys()
    assert rows["sync"]["mean"]["staleness_max"] == 0
    assert rows["multi_version"]["mean"]["staleness_max"] <= 1
    assert result["ratios"].keys() == {"sync"}
    assert picture.stat().st_size > 1000
    assert "multi_version / sync" in capsys.readouterr().out
    for name in ("sync-1x1+1-0", "multi_version-1x1+1-0"):
        assert main(["audit", str(tmp_path / "runs" / "runs" / name)]) == 0
    # The folder holds runs now; a second comparison must not mix with them.
    assert main(argv) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.full
def test_the_controller_alone_keeps_every_promise(tmp_path: Path) -> None:
    """`benchmarks/control_plane.py` with few instances: real messages, moves among them."""
    out = tmp_path / "control_plane.json"
    argv = ["--instances", "4", "--steps", "8", "--speed", "60", "--json", str(out)]
    program = ROOT / "benchmarks" / "control_plane.py"
    done = subprocess.run([sys.executable, str(program), *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "audit findings 0" in done.stdout
