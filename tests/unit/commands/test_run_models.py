"""Which weights a directory stands for: last, best, numbered, sealed or checkpointed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from dora_rl.cli import main
from dora_rl.config import ModelConfig, RunConfig
from dora_rl.core import events as ev
from dora_rl.observe.eventlog import FileLog
from dora_rl.types import UserError
from dora_rl.weights.run_models import export_model, find_model, is_run, newer_model
from dora_rl.weights.store import DiskWeightStore
from tests.kit.places import MODEL


@pytest.fixture
def run(tmp_path):
    """Sealed versions 2 and 3, checkpoints after steps 1 and 2, evaluations in metrics.jsonl."""
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    config = RunConfig(model=ModelConfig(path=str(MODEL)))
    (folder / "config.json").write_text(config.model_dump_json())
    store = DiskWeightStore(folder / "weights")
    for version in (2, 3):
        store.publish(version, [("model.norm.weight", torch.full((4,), float(version)))], None)
    for step in (0, 1):
        path = folder / "checkpoints" / f"step_{step:06d}"
        shutil.copytree(MODEL, path)
        (path / "trainer").mkdir()
        state = {"format": 1, "next_step": step + 1}
        (path / "trainer" / "state.json").write_text(json.dumps(state))
    lines = [{"version": 1, "eval/sampled": 0.9}, {"version": 2, "eval/sampled": 0.7}]
    lines += [{"version": 0, "eval/sampled": 0.99}, {"step": 0, "loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_last_is_the_newest_and_a_checkpoint_goes_before_sealed_weights(run):
    last = find_model(run, "last")
    assert (last.version, last.sealed is not None) == (3, True)
    assert find_model(run, "2").directory.name == "step_000001"


def test_what_the_log_has_not_committed_yet_is_never_last(run):
    """A run that stops may have sealed a version whose step is not in its log."""
    log = FileLog.create(run / "events")
    with pytest.raises(UserError, match=r"its log ends before version 1; give --step of 1, 2, 3"):
        find_model(run, "last")
    for step in (0, 1):
        log.append(0.0, ev.StepCommitted(step, ""), [])
    assert find_model(run, "last").version == 2 and find_model(run, "3").version == 3
    assert newer_model(run, 1).version == 2 and newer_model(run, 2) is None
    log.append(0.0, ev.StepCommitted(2, ""), [])
    assert find_model(run, "last").version == newer_model(run, 2).version == 3
    log.append(0.0, ev.Rewound(2), [])
    assert find_model(run, "last").version == 2


def rate(run, *lines):
    text = "".join(json.dumps({"version": v, "eval/greedy": score}) + "\n" for v, score in lines)
    (run / "metrics.jsonl").write_text(text)


def test_best_is_the_best_evaluated_version_and_no_checkpoint_beats_it(run):
    # Versions 1 and 2 have checkpoints, 2 and 3 sealed weights.
    rate(run, (1, 0.3), (2, 0.5), (3, 0.9))
    for step, score in ((0, 0.3), (1, 0.5)):
        path = run / "checkpoints" / f"step_{step:06d}" / "trainer" / "score.json"
        path.write_text(json.dumps({"score": score}))
    best = find_model(run, "best")
    assert (best.version, best.sealed is not None) == (3, True)
    rate(run, (1, 0.3), (2, 0.5), (3, 0.1))
    assert find_model(run, "best").directory.name == "step_000001"


def test_weights_of_the_best_that_are_gone_are_said_to_be(run):
    rate(run, (1, 0.3), (2, 0.5), (7, 0.9))
    with pytest.raises(UserError, match=r"version 7 is best .* does not keep .*--step 2 \(0\.5\)"):
        find_model(run, "best")


def test_a_run_that_only_got_worse_has_its_beginning_as_best(run):
    rate(run, (0, 0.99), (2, 0.5))
    best = find_model(run, "best")
    assert (best.version, best.directory) == (0, MODEL)


def test_a_failed_evaluation_is_never_best(run):
    rate(run, (1, None), (2, 0.0))
    assert find_model(run, "best").version == 2


@pytest.mark.parametrize(
    ("step", "says"), [("7", "after steps 1, 2, 3"), ("newest", "give a number of steps")]
)
def test_a_step_that_is_not_there_is_one_line(run, step, says):
    with pytest.raises(UserError, match=says):
        find_model(run, step)


def test_best_needs_an_evaluation(run):
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no evaluation with a score; use last"):
        find_model(run, "best")


def test_models_and_runs_are_told_apart(run, tmp_path):
    assert is_run(run)
    assert not is_run(MODEL)
    assert find_model(MODEL).directory == MODEL
    with pytest.raises(UserError, match="only a run has steps"):
        find_model(MODEL, "3")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        find_model(tmp_path / "empty")


def test_export_writes_sealed_weights_beside_the_tokenizer(run, tmp_path):
    from safetensors.torch import load_file

    out = tmp_path / "out"
    export_model(find_model(run, "last"), out)
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert load_file(out / "model.safetensors")["model.norm.weight"].tolist() == [3.0] * 4
    with pytest.raises(UserError, match="not an empty directory"):
        export_model(find_model(run, "last"), out)


def test_export_of_a_checkpoint_leaves_the_trainer_behind(run, tmp_path):
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--step", "2"]) == 0
    assert not (out / "trainer").exists()
    assert (MODEL / "README.md").is_file() and not (out / "README.md").exists(), "of another model"
    assert (out / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line(capsys):
    config = str(MODEL.parents[1] / "quickstart.toml")
    assert main(["eval", str(MODEL), "runtime.device=cuda", "--config", config]) == 2
    said = capsys.readouterr().err
    assert "runtime.device: cuda is asked for" in said and len(said.splitlines()) == 1
