"""check, eval, export, sft and bench as a user calls them: figures, and one line for mistakes."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from dora_rl.cli import main
from dora_rl.commands.train import set_aside_lines
from dora_rl.data.tasks import Chains
from tests.kit.places import MODEL, ROOT

QUICKSTART = ROOT / "recipes" / "quickstart.toml"
HERE = [f"model.path={MODEL}"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


WRONG = {
    ("eval", "/nowhere"): "/nowhere is neither a run nor a model directory",
    ("eval", str(MODEL)): "add --config FILE.toml",
    ("eval", str(MODEL), "--samples", "0"): "--samples: must be at least 1, not 0",
    ("export", "/nowhere", "out"): "not a run directory",
    ("export", str(MODEL), "out"): "is not a run directory",
    ("sft", "x.jsonl", "--model", "/nowhere", "--out", "out"): "--model: /nowhere is not a",
    ("sft", "x.jsonl", "--model", str(MODEL), "--out", "out"): "no such file",
    ("sft", "x.jsonl", "--model", str(MODEL), "--out", "out", "--lr", "0"): "--lr must be more",
    ("check", "/nowhere.toml"): "/nowhere.toml does not exist",
    ("check", str(QUICKSTART), "rollout.num_instance=3"): "did you mean rollout.num_instances?",
    ("bench", "paradigm", "x.toml"): "invalid choice: 'paradigm'",
    ("bench", "paradigms", str(QUICKSTART), "--modes", "snyc"): "did you mean 'sync'?",
    ("bench", "paradigms", str(QUICKSTART), *HERE, "--steps", "4"): "4 steps are too few",
    ("bench", "paradigms", str(QUICKSTART), "--split", "2"): "write IxT+L",
}


@pytest.mark.parametrize("argv", WRONG, ids=lambda argv: " ".join(argv)[:60])
def test_wrong_input_gets_one_line_and_status_2(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(list(argv)) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert WRONG[argv] in said.err


def test_check_tells_the_machine_apart_from_the_plan(tmp_path, capsys):
    out = tmp_path / "check.json"
    assert main(["check", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert found["machine"]["libraries"]["torch"].startswith("2.")
    assert "plan" not in found
    assert "cores may be used" in capsys.readouterr().out


def test_check_says_what_a_run_would_do_and_what_does_not_fit(tmp_path, capsys):
    out = tmp_path / "check.json"
    settings = [*HERE, f"runtime.run_dir={tmp_path / 'run'}", "rollout.num_instances=1"]
    assert (
        main(["check", str(QUICKSTART), *settings, "rollout.seqs_max=512", "--json", str(out)]) == 0
    )
    plan = json.loads(out.read_text())["plan"]
    assert plan["parameters"] == pytest.approx(396_032, rel=0.01)
    assert plan["resident_versions"] == 3
    assert plan["inflight_requests"] == plan["inflight_groups"] * 8
    assert plan["problems"] == []
    capsys.readouterr()
    assert main(["check", str(QUICKSTART), *settings, "rollout.seqs_max=8"]) == 1
    assert "only 8 slots" in capsys.readouterr().out
    kept = shutil.disk_usage(tmp_path).total // (12 * plan["parameters"])
    assert main(["check", str(QUICKSTART), *settings, f"checkpoint.keep={kept}"]) == 1
    assert "is too small: put runtime.run_dir on another" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_eval_of_a_model_with_a_config(tmp_path, capsys):
    out = tmp_path / "eval.json"
    argv = [
        "eval",
        str(MODEL),
        "--config",
        str(QUICKSTART),
        "--num-prompts",
        "12",
        "--samples",
        "2",
    ]
    argv += ["rollout.tokens_max=96", "rollout.kv_bytes_max=16777216", "--json", str(out)]
    assert main(argv) == 0
    first = json.loads(out.read_text())
    assert first["num_prompts"] == 12
    assert first["num_failed"] == 0
    assert 0 <= first["pass@1"] <= first["pass@2"] <= 1
    assert main(argv) == 0
    assert json.loads(out.read_text()) == first  # the same answers every time
    assert "greedy" in capsys.readouterr().out


def test_eval_of_a_reward_that_raises_is_failed_and_no_zero(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def f(completion, answer):\n    raise ValueError('boom')\n")
    out = tmp_path / "eval.json"
    argv = ["eval", str(MODEL), "--config", str(QUICKSTART), "--num-prompts", "2"]
    argv += ["rollout.tokens_max=8", "rollout.kv_bytes_max=16777216", "--json", str(out)]
    assert main([*argv, f"reward.functions={tmp_path / 'mine.py'}:f"]) == 1
    said = capsys.readouterr()
    assert "failed: 4 of 4 answers failed" in said.out and "greedy" not in said.out
    assert json.loads(out.read_text())["greedy"] is None


def test_sft_lowers_the_loss_and_writes_a_model(tmp_path, capsys):
    data, out, figures = tmp_path / "d.jsonl", tmp_path / "out", tmp_path / "sft.json"
    rows = [Chains(num_steps_max=6).row(0, index, "train") for index in range(32)]
    data.write_text(
        "".join(
            json.dumps({"prompt": row["prompt"], "completion": f"={row['answer']}"}) + "\n"
            for row in rows
        )
    )
    argv = ["sft", str(data), "--model", str(MODEL), "--out", str(out), "--epochs", "6"]
    argv += ["--lr", "5e-4", "--batch-examples", "16", "--threads", "1", "--json", str(figures)]
    assert main(argv) == 0
    said = json.loads(figures.read_text())
    assert said["num_updates"] == 12
    assert said["loss_last"] < said["loss_first"]
    assert (out / "tokenizer.json").is_file()
    capsys.readouterr()
    assert main(argv) == 2
    assert "not an empty directory" in capsys.readouterr().err


def test_the_last_lines_of_a_run_name_what_was_set_aside() -> None:
    aside = [{"prompt": place, "reason": "raised KeyError"} for place in range(7)]
    lines = set_aside_lines({"set_aside": aside})
    assert lines[0] == "  set aside: prompt 0: raised KeyError"
    assert len(lines) == 6 and lines[-1] == "  and 2 more; all are in summary.json"
    assert set_aside_lines({"set_aside": []}) == set_aside_lines({}) == []
