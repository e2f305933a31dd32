"""Every recipe, brought down to a tiny stand-in, goes through the same code as the real one."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from pathlib import Path

import pytest

from dora_rl.cli import main
from dora_rl.setup.settings import load_config
from tests.kit.places import ROOT
from tests.kit.recipe_models import stand_in

RECIPES = ROOT / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))
REAL = [
    "gsm8k_1.5b",
    "gsm8k_1.5b_lora",
    "gsm8k_135m",
    "longtail_1.5b",
    "math_lora_qwen3_1.7b",
    "math_qwen3_0.6b",
    "text_format",
]


def test_every_recipe_is_known_here():
    tiny = ["quickstart", "longtail", "tool", "game", "mixed", "distill"]
    packages = ["reasoning_gym", "textarena", "verifiers", "openenv"]  # run in tests/packages
    assert sorted([*REAL, *tiny, *packages]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_nothing_twice_and_is_valid(name):
    path = RECIPES / f"{name}.toml"
    config = load_config(path)
    given = tomllib.loads(path.read_text())
    assert config.runtime.run_dir == f"runs/{name}"
    assert given["orchestration"]["mode"] == "multi_version"
    lines = config.orchestration
    assert lines.inflight_groups <= (lines.max_staleness + 1) * lines.batch_groups


@pytest.mark.parametrize("name", REAL)
def test_a_recipe_for_a_gpu_leaves_its_memory_to_the_plan(name):
    config = load_config(RECIPES / f"{name}.toml")
    rollout, trainer, lines = config.rollout, config.trainer, config.orchestration
    assert not (rollout.kv_bytes_max or rollout.num_blocks or rollout.versions_max)
    assert not (trainer.pack_tokens or trainer.logits_chunk_tokens)
    assert trainer.activation_checkpointing == "auto"
    groups = lines.inflight_groups or 3 * lines.batch_groups // 2
    assert groups * rollout.num_samples <= rollout.seqs_max * rollout.num_instances


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    def of(name: str) -> list[str]:
        return stand_in(tmp_path_factory.mktemp("recipes"), name)

    return of


@pytest.fixture
def signals_as_before():
    """`train` takes Ctrl-C and SIGTERM over for the rest of its process, which is ours here."""
    held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in held.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", REAL)
def test_check_accepts_the_stand_in(name, small, capsys):
    assert main(["check", str(RECIPES / f"{name}.toml"), *small(name)]) == 0
    said = capsys.readouterr().out
    assert "this run fits" in said


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize(
    "name",
    [
        "gsm8k_1.5b",
        pytest.param("math_qwen3_0.6b", marks=pytest.mark.full),
        pytest.param("gsm8k_1.5b_lora", marks=pytest.mark.full),
        pytest.param("math_lora_qwen3_1.7b", marks=pytest.mark.full),
        pytest.param("text_format", marks=pytest.mark.full),
    ],
)
def test_train_audit_eval_export(name, tmp_path, capsys):
    """Two steps, a clean audit, an evaluation of the result and a directory that loads."""
    overrides = stand_in(tmp_path, name)
    run = tmp_path / "run"
    assert main(["train", str(RECIPES / f"{name}.toml"), *overrides]) == 0
    assert main(["audit", str(run)]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["discarded_tokens"] == 0
    report = tmp_path / "eval.json"
    assert main(["eval", str(run), "--num-prompts", "2", "--json", str(report)]) == 0
    assert json.loads(report.read_text())["version"] == 2
    out = tmp_path / "exported"
    assert main(["export", str(run), str(out)]) == 0
    _loads_anywhere(out, tmp_path / "model")
    capsys.readouterr()


def _loads_anywhere(out: Path, start: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out)
    assert not list(out.glob("*.bin"))
    assert model.config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(out).encode("1 + 1")
    begun = AutoModelForCausalLM.from_pretrained(start)
    assert dict(begun.named_parameters()).keys() == dict(model.named_parameters()).keys()
