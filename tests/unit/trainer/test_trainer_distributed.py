"""Two gloo ranks give the update of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.exact_cases import write_exact_model
from tests.kit.places import ROOT
from tests.kit.trainer_cases import write_tiny_model
from tests.kit.trainer_rank import run_rank
from tests.unit.trainer.foreign_families import write_family

FULL = pytest.mark.full


def run_two(
    model: Path, out: Path, loss: str, pack_tokens: int, *options: dict[str, Any] | bool
) -> list[subprocess.Popen[bytes]]:
    """Start both ranks; `options` are those of `run_rank`."""
    out.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [str(out / "meeting"), str(model), str(out), loss, str(pack_tokens)]
    arguments.append(json.dumps(options))
    command = [sys.executable, "-m", "tests.kit.trainer_rank"]
    return [
        subprocess.Popen([*command, str(r), "2", *arguments], env=env, cwd=ROOT) for r in range(2)
    ]


def finish(started: list[subprocess.Popen[bytes]], out: Path) -> dict[str, torch.Tensor]:
    assert [p.wait(timeout=1200) for p in started] == [0, 0]
    return load_file(out / "result.safetensors")


@pytest.mark.parametrize(
    ("loss", "pack_tokens", "options"),
    [
        ("grpo", 40, {}),
        ("grpo", 40, {"lora_rank": 3, "lora_publish": "adapters"}),
        pytest.param("grpo", 40, {"lora_rank": 3, "lora_publish": "merged"}, marks=FULL),
        pytest.param("ppo", 40, {}, marks=FULL),
        pytest.param("dapo", 4000, {}, marks=FULL),
    ],
)
def test_two_ranks_give_the_update_of_one(
    model_dir: Path, tmp_path: Path, loss: str, pack_tokens: int, options: dict[str, Any]
) -> None:
    algorithm = {"old_logprobs": "behaviour"} if options else {}
    started = run_two(model_dir, tmp_path / "two", loss, pack_tokens, options, algorithm)
    (tmp_path / "one").mkdir()
    run_rank(model_dir, tmp_path / "one", loss, pack_tokens, options, algorithm)
    two = finish(started, tmp_path / "two")
    one = load_file(tmp_path / "one" / "result.safetensors")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(two[name], tensor, atol=1e-5, rtol=1e-4), name


@pytest.mark.full
@pytest.mark.parametrize(("loss", "family"), [("ppo", "deepseek_v3"), ("grpo", "gemma2")])
def test_two_ranks_with_a_model_run_by_transformers(tmp_path: Path, loss: str, family: str) -> None:
    test_two_ranks_give_the_update_of_one(
        write_family(tmp_path / "model", family), tmp_path, loss, 40, {}
    )


@pytest.mark.full
@pytest.mark.parametrize("layers", ["none", "layer"])
def test_two_ranks_with_a_mixture_that_replays(tmp_path: Path, layers: str) -> None:
    model = write_tiny_model(tmp_path / "model", "qwen3_moe")
    options = {"router_aux_coef": 0.1, "activation_checkpointing": layers}
    test_two_ranks_give_the_update_of_one(model, tmp_path, "grpo", 40, options)


@pytest.mark.parametrize(
    ("loss", "form"),
    [
        ("longcat", "adapters"),
        pytest.param("longcat", "merged", marks=FULL),
        pytest.param("ppo", "whole", marks=FULL),
    ],
)
def test_ranks_in_bfloat16_see_no_gap(tmp_path: Path, loss: str, form: str) -> None:
    """With lr 0 what a rank computes from its shards is what its twin computes, bit for bit."""
    model = write_exact_model(tmp_path / "model", "qwen3")
    trainer: dict[str, Any] = {"lr": 0.0, "compute_dtype": "bfloat16"}
    algorithm = {"old_logprobs": "behaviour", "clip_low": 1e-9, "clip_high": 1e-9}
    algorithm |= {"kl_estimator": "k2", "critic_lr": 0.0, "constant_tokens": 20}
    adapted = form != "whole"
    if adapted:  # moved away from the reference
        trainer |= {"lora_rank": 3, "lora_publish": form}
        algorithm |= {"kl_coef": 0.0}
    out = tmp_path / "two"
    found = finish(run_two(model, out, loss, 40, trainer, algorithm, adapted), out)
    for name in ("ppo_kl", "clip_ratio/low", "clip_ratio/high", *(() if adapted else ("kl",))):
        assert found[f"metric:{name}"] == 0.0, name


LISTENS = """
import os, sys
from pathlib import Path
from dora_rl.trainer.distributed import interface_of, join

join(sys.argv[1], int(sys.argv[2]), 2)
print(os.environ.get("GLOO_SOCKET_IFNAME") == interface_of("127.0.0.1"), flush=True)
own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if
       os.path.islink(f"/proc/self/fd/{fd}")}
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            print(words[1].partition(":")[0], flush=True)
sys.stdin.read()
"""


def test_ranks_of_one_machine_are_reached_from_there_only(tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, **hidden, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LISTENS, str(tmp_path / "meeting"), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(2)
    ]
    said: list[list[str]] = []
    for rank in ranks:
        assert rank.stdout is not None
        said.append([rank.stdout.readline().strip() for _ in range(2)])
    for lines, rank in zip(said, ranks, strict=True):
        lines += rank.communicate()[0].split()
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    for named, *places in said:
        assert named == "True", "whatever the host's name stands for"
        assert places and set(places) <= loopback
