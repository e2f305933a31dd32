"""Two gloo ranks give the update of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foreign_families import write_family
from safetensors.torch import load_file
from trainer_rank import run_rank

RANK = Path(__file__).with_name("trainer_rank.py")


@pytest.mark.parametrize(
    ("loss", "pack_tokens", "family"),
    [
        ("grpo", 40, ""),
        pytest.param("ppo", 40, "", marks=pytest.mark.full),
        pytest.param("dapo", 4000, "", marks=pytest.mark.full),
        pytest.param("ppo", 40, "deepseek_v3", marks=pytest.mark.full),
        pytest.param("grpo", 40, "gemma2", marks=pytest.mark.full),
    ],
)
def test_two_ranks_give_the_update_of_one(
    model_dir: Path, tmp_path: Path, loss: str, pack_tokens: int, family: str
) -> None:
    if family:
        model_dir = write_family(tmp_path / "model", family)
    out = {1: tmp_path / "one", 2: tmp_path / "two"}
    for path in out.values():
        path.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [str(tmp_path / "meeting"), str(model_dir), str(out[2]), loss, str(pack_tokens)]
    started = [
        subprocess.Popen([sys.executable, str(RANK), str(r), "2", *arguments], env=env)
        for r in range(2)
    ]
    run_rank(model_dir, out[1], loss, pack_tokens)
    assert [p.wait(timeout=1200) for p in started] == [0, 0]
    one, two = (load_file(out[n] / "result.safetensors") for n in (1, 2))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(two[name], tensor, atol=1e-5, rtol=1e-4), name
