"""Mistakes of the user: one clear line each, before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from dora_rl.cli import main
from dora_rl.worlds import kinds
from tests.kit.places import MODEL
from tests.kit.tiny_runs import tiny_run


def refuse(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
    **settings: Any,
) -> str:
    """The line that `dora-rl train` answers with; nothing may have been started or written."""
    run = tiny_run(folder, **settings)
    status = main([str(word) for word in run.command(*arguments)[3:]])
    captured = capsys.readouterr()
    assert status == 2, captured
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("dora-rl: error: "), captured.err
    assert not run.run_dir.exists() or not (run.run_dir / "logs").exists()
    return lines[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.num_sample=4", ["rollout.num_sample", "did you mean rollout.num_samples?"]),
        ("rolout.num_samples=4", ["rolout", "did you mean rollout?"]),
        ("orchestration.num_steps=many", ["orchestration.num_steps", "integer"]),
        ("orchestration.mode=fast", ["orchestration.mode", "multi_version"]),
        ("trainer.updates_per_step=3", ["batch_groups (4)", "updates_per_step (3)"]),
        ("orchestration.samples_min=9", ["samples_min (9)", "group_size (4)"]),
        ("model.path=/nowhere", ["model.path", "/nowhere", "not a directory"]),
        ("data.train=/nowhere.jsonl", ["data.train: /nowhere.jsonl does not exist"]),
        ("data.eval=/nowhere.jsonl", ["data.eval: /nowhere.jsonl does not exist"]),
        ("reward.functions=/nowhere.py:reward", ["/nowhere.py"]),
        ("reward.functions=exactly", ["exactly", "exact"]),
        ("runtime.device=cuda:7", ["runtime.device"]),
        ("trainer.learning_rate=1e-5", ["trainer.learning_rate", "there are lr, betas"]),
        ("trainer.lr=-1", ["trainer.lr = -1", "must be at least 0"]),
        ("trainer.schedule=cosine", ["trainer.schedule", "needs trainer.num_updates"]),
        ("algorithm.loss=gprpo", ["algorithm.loss", "did you mean 'grpo'?"]),
        ("algorithm.loss=dr_grpo", ["algorithm.constant_tokens"]),
        ("algorithm.loss=/nowhere.py:loss", ["/nowhere.py", "check algorithm.loss"]),
        ("algorithm.advantage=groups", ["algorithm.advantage", "did you mean 'group'?"]),
        ("rollout.tokens_max=5000", ["rollout.tokens_max", "exceed the context of 512"]),
        ("data.prompt_column=question", ["unknown key", "a key of an entry of data.train"]),
        ("rollout.block_tokens=5", ["rollout.block_tokens", "power of two"]),
        ("logging.sinks=wandb", ["logging.sinks", "write a list"]),
        ('data.train=[{path="x", prompt_colum="q"}]', ["prompt_colum", "no such key"]),
        ("trainer.betas=[0.9, 1.5]", ["trainer.betas.1 = 1.5", "must be at least 0 and below 1"]),
        ("runtime.run_dir=/dev/null/run", ["runtime.run_dir", "cannot make /dev/null/run"]),
        ("num_steps=4", ["num_steps=4", "section.key=value"]),
        ("rollout.kv_bytes_max=100", ["rollout.kv_bytes_max", "at least two"]),
        ("rollout.kv_bytes_max=200000", ["rollout.kv_bytes_max", "a prompt of"]),
        ("trainer.device=cuda", ["trainer.device", "sees no GPU"]),
        ("trainer.attention=flex", ["trainer.attention", "needs CUDA"]),
        ("trainer.attention=varlen", ["trainer.attention", "needs CUDA"]),
        ("trainer.reference_model=/nowhere", ["trainer.reference_model", "/nowhere"]),
    ],
)
def test_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: list[str]
) -> None:
    line = refuse(tmp_path, capsys, override)
    for word in words:
        assert word in line, line


@pytest.mark.parametrize(
    ("targets", "publish", "words"),
    [
        (["q_porj"], "adapters", ["trainer.lora_targets", "did you mean 'q_proj'?"]),
        (["q_proj", "lm_head"], "adapters", ["trainer.lora_targets 'lm_head'"]),
        (["lm_head"], "merged", ["trainer.lora_targets 'lm_head'", "known: "]),  # it is tied
    ],
)
def test_adapters(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    targets: list[str],
    publish: str,
    words: list[str],
) -> None:
    settings = {"trainer__lora_targets": targets, "trainer__lora_publish": publish}
    line = refuse(tmp_path, capsys, trainer__lora_rank=2, **settings)
    for word in words:
        assert word in line, line


def test_ray_without_authentication(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "find_spec", lambda name: None)
    assert "Ray is missing" in refuse(tmp_path, capsys, runtime__world="ray")
    monkeypatch.setattr(kinds, "find_spec", lambda name: object())
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "RAY_AUTH_MODE is 'disabled'" in refuse(tmp_path, capsys, runtime__world="ray")


def test_a_file_that_is_not_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[model\npath = 3")
    assert main(["train", str(path)]) == 2
    assert "broken.toml" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "missing.toml")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("*.safetensors", ["no *.safetensors"]),
        ("tokenizer*", ["no tokenizer"]),
        ("config.json", ["config.json"]),
    ],
)
def test_model_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without: str, words: list[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    for path in model.glob(without):
        path.unlink()
    line = refuse(tmp_path, capsys, model__path=str(model))
    for word in [*words, str(model)]:
        assert word in line, line


def cut(model: Path) -> None:
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:100_000])


def other_shape(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["intermediate_size"] += 8
    (model / "config.json").write_text(json.dumps(config))


def more_layers(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (model / "config.json").write_text(json.dumps(config))


def list_as_config(model: Path) -> None:
    (model / "config.json").write_text("[]")


def list_as_generation_config(model: Path) -> None:
    (model / "generation_config.json").write_text("[1]")


def lost_shard(model: Path) -> None:
    weight_map = {"model.norm.weight": "model-00001-of-00001.safetensors"}
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def wrong_index(model: Path) -> None:
    weight_map = {"model.norm.wait": "model.safetensors"}
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, ["model.safetensors: truncated"]),
        (other_shape, ["mlp.", "config.json says"]),
        (more_layers, ["tensors are missing, the first is model.layers."]),
        (list_as_config, ["/config.json: not a JSON object"]),
        (list_as_generation_config, ["generation_config.json: not a JSON object"]),
        (lost_shard, ["model-00001-of-00001.safetensors: the file is missing"]),
        (wrong_index, ["model.safetensors: no tensor model.norm.wait"]),
    ],
)
def test_damaged_models(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    words: list[str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    damage(model)
    for key in ("model__path", "trainer__reference_model"):
        line = refuse(tmp_path / key, capsys, **{key: str(model)})
        for word in [*words, str(model)]:
            assert word in line, line


def test_a_reference_with_another_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    of_tokens = ("model.embed_tokens.weight", "lm_head.weight")
    fewer = {name: t[:-1].copy() if name in of_tokens else t for name, t in tensors.items()}
    save_file(fewer, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    vocab = config["vocab_size"] - 1
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": vocab}))
    line = refuse(tmp_path, capsys, trainer__reference_model=str(model))
    assert "trainer.reference_model" in line and f"has {vocab} tokens" in line


def test_a_model_that_the_engine_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["OtherModel"]}))
    line = refuse(tmp_path, capsys, model__path=str(model))
    assert "OtherModel" in line and "Qwen3ForCausalLM" in line


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def other(completion): return 0.0", ["reward"]),
        ("reward = 3", ["reward"]),
        ("def reward(): return 0.0", ["reward"]),
        ("import nothing_like_this", ["nothing_like_this"]),
        ("import sys; sys.exit(3)", ["SystemExit: 3"]),
    ],
)
def test_reward_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, words: list[str]
) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(code)
    line = refuse(tmp_path, capsys, reward__functions=[f"{path}:reward"])
    for word in [*words, "my_reward.py"]:
        assert word in line, line


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"question": "1:23"}', ["prompt", "question", "prompt_column"]),
        ('{"prompt": ""}', ["empty"]),
        ('{"prompt": 7}', ["must be a string"]),
        ('{"prompt": "1', ["rows.jsonl"]),
    ],
)
def test_data_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, words: list[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "03:274\\n", "answer": "637"}\n' + row + "\n")
    line = refuse(tmp_path, capsys, data__train=[str(path)])
    for word in [*words, "rows.jsonl", "2"]:
        assert word in line, line


def test_a_prompt_that_fills_the_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1" * 600, "answer": "7"}) + "\n")
    line = refuse(tmp_path, capsys, data__train=[str(path)])
    assert "600 tokens leaves no room in the context of 512" in line
    assert "data.prompt_tokens_max" in line


def test_a_directory_that_holds_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(tmp_path)
    words = [str(word) for word in run.command()[3:]]
    assert main([*words, "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
    (run.run_dir / "events").mkdir(parents=True)
    (run.run_dir / "events" / "000000000000.jsonl").touch()
    assert main(words) == 2
    line = capsys.readouterr().err
    assert "already holds a run" in line and "--resume" in line


def test_a_dry_run_starts_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(tmp_path)
    assert main([str(word) for word in run.command("--dry-run")[3:]]) == 0
    assert "3 steps of 4 groups x 4 samples" in capsys.readouterr().out
    assert not run.run_dir.exists()
