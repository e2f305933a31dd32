"""A run of LoRA versions whose base is exchanged in between: one line, and no step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.kit.places import MODEL
from tests.kit.tiny_runs import STOPPED, tiny_run


@pytest.mark.full
def test_a_base_that_changed_is_not_resumed_on(tmp_path: Path) -> None:
    base = tmp_path / "model"
    shutil.copytree(MODEL, base)
    settings = {"model__path": str(base), "trainer__lora_rank": 4}
    run = tiny_run(tmp_path, orchestration__num_steps=2, **settings)
    run.train()
    manifests = list((run.run_dir / "weights").glob("0*/manifest.json"))
    bases = {json.loads(path.read_text())["manifest"]["base"] for path in manifests}
    assert manifests and len(bases) == 1 and len(bases.pop()) == 64
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][0] += 1.0
    save_file(tensors, base / "model.safetensors")
    said = run.train("orchestration.num_steps=3", "--resume", status=STOPPED)
    assert "is an adapter for a base with checksum" in said and "Traceback" not in said
    assert run.steps() == [0, 1]
