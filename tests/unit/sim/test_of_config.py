"""`plan` and `sim` take a configuration or a run: its model, batch, bound and lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dora_rl.cli import main
from dora_rl.data.lengths import Empirical, mean_of
from dora_rl.sim.of_config import preset_of_path
from dora_rl.types import UserError
from tests.kit.places import MODEL, ROOT
from tests.kit.tiny_models import save_model
from tests.kit.tiny_runs import tiny_run

QUICK = ["--steps", "4", "--jobs", "1"]


def a_run(folder: Path, samples: list[tuple[int, int]]) -> Path:
    """As far as a finished run matters here."""
    run = folder / "run"
    (run / "events").mkdir(parents=True)
    (run / "config.json").write_text(tiny_run(folder).config.read_text())
    lines = [json.dumps({"num_tokens": n, "num_prompt": p}) + "\n" for n, p in samples]
    (run / "rollouts.jsonl").write_text("".join(lines))
    return run


def test_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    preset, said = preset_of_path(ROOT / "recipes" / "quickstart.toml")
    assert (preset.batch_groups, preset.group_size, preset.max_staleness) == (32, 8, 2)
    assert (preset.num_devices, preset.tensor_parallel, preset.inflight_share) == (3, 1, 1.5)
    assert mean_of(preset.lengths) == pytest.approx(448 / 4, rel=0.01) and "assumed" in said
    assert preset.model.params == preset.model.params_active == 395_264  # norms not counted
    path = str(ROOT / "recipes" / "quickstart.toml")
    assert main(["sim", path, "--mode", "sync,multi_version", *QUICK]) == 0
    shown = capsys.readouterr()
    assert "multi_version" in shown.out and "3 x H800" in shown.err


def test_a_run_brings_its_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path, [(10, 4), (30, 4), (20, 6), (500, 4)])
    preset, said = preset_of_path(run)
    assert preset.lengths == Empirical((10, 20, 30, 500)) and preset.prompt_tokens == 4
    assert (preset.batch_groups, preset.group_size) == (4, 4) and "4 trained samples" in said
    out = tmp_path / "plan.json"
    assert main(["plan", str(run), "--gpus", "4", "--json", str(out), *QUICK]) == 0
    assert json.loads(out.read_text()) and str(run) in capsys.readouterr().err


def test_a_mixture_of_experts_has_active_parameters(tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path / "moe")
    config = json.loads(tiny_run(tmp_path).config.read_text())
    config["model"]["path"] = str(tmp_path / "moe")
    path = tmp_path / "moe.json"
    path.write_text(json.dumps(config))
    model = preset_of_path(path)[0].model
    # Two layers, 6 of 8 experts idle, three matrices of 64 x 32.
    assert model.params - model.params_active == 2 * 6 * 3 * 64 * 32


def test_what_is_no_testbed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="has no trained samples"):
        preset_of_path(a_run(tmp_path, []))
    for name, says in (
        (str(MODEL), "is a directory and no run"),
        ("absent.toml", "configuration absent.toml does not exist"),
        ("smal", "did you mean 'small'?"),
    ):
        assert main(["plan", name]) == 2
        assert says in capsys.readouterr().err
