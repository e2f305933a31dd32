"""A whole run on one GPU: it learns, nobody is lost on the way, and the audit is clean.

Run with `pytest tests/gpu/test_train_gpu.py -m gpu` on a machine with a CUDA device and Triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kit.places import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS = (
    "runtime.device=cuda",
    "rollout.kv_bytes_max=2000000000",
    "rollout.context_max=512",
    "evaluation.every_steps=10",
    "orchestration.num_steps=20",
)


def dora_rl(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dora_rl.cli", *words]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("mode", ["multi_version", "sync"])
def test_the_quick_start_learns_on_a_gpu(tmp_path: Path, mode: str) -> None:
    run_dir = tmp_path / "run"
    where = (f"runtime.run_dir={run_dir}", f"orchestration.mode={mode}")
    done = dora_rl("train", "recipes/quickstart.toml", *SETTINGS, *where)
    logs = "\n".join(path.read_text()[-3000:] for path in (run_dir / "logs").glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    events = "".join(path.read_text() for path in sorted((run_dir / "events").glob("*.jsonl")))
    for lost in ("InstanceLost", "LearnerLost"):
        assert f'"is":"{lost}"' not in events, logs
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 20
    assert summary["eval_last"]["sampled"] > summary["eval_first"]["sampled"] + 0.3
    audit = dora_rl("audit", str(run_dir))
    assert audit.returncode == 0, audit.stdout + audit.stderr
