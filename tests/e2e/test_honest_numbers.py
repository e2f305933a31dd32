"""Real runs: the best evaluated version stays and is what is exported, failures are called that,
tracebacks reach a file, and a run directory that vanishes ends the run with one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dora_rl.cli import main
from dora_rl.weights.run_models import find_model
from tests.kit.tiny_runs import ENDLESS, STOPPED, finish, tiny_run, wait_until

# Raises for one of the eight held-out prompts.
REWARD = """
from dora_rl.data.chains import reward

def score(prompt: str, completion: str, answer: str) -> float:
    if prompt.startswith("00:900"):
        raise LookupError("the table is gone")
    return reward(completion, answer)
"""


def test_the_best_version_is_kept_failures_are_no_zeros_and_tracebacks_are_kept(
    tmp_path: Path, capsys
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    # Answers that nobody gives: every version has the same score, and the first is best.
    rows = [{"prompt": f"00:90{i}\n", "answer": "never"} for i in range(8)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tiny_run(
        tmp_path,
        data__eval=[str(tmp_path / "eval.jsonl")],
        data__check_disjoint=False,
        evaluation__every_steps=2,
        evaluation__num_prompts=8,
        evaluation__failed_share_max=0.2,
        orchestration__num_steps=4,
        orchestration__max_staleness=0,
        rollout__num_instances=1,
        rollout__tokens_max=48,
        checkpoint__every_steps=4,
        reward__functions=[f"{tmp_path}/mine.py:score"],
        logging__progress=True,
    )
    said = run.train()
    lines = {line["version"]: line for line in run.lines("metrics.jsonl") if "step" not in line}
    assert sorted(lines) == [0, 2, 4]
    for line in lines.values():
        assert line["eval/greedy"] == 0.0 and line["eval/num_failed"] == 2
        assert line["eval/num_answers"] == 16
    assert "(2 of 16 answers failed: reward" in said and "last evaluation: 2 of 16" in said
    # Of equals the later is best, and it is what is exported.
    assert run.summary()["best"] == {"version": 4, "metric": "eval/greedy", "value": 0.0}
    sealed = {int(path.name) for path in (run.run_dir / "weights").glob("0*")}
    assert not sealed & {0, 1, 2}
    assert find_model(run.run_dir, "best").version == 4
    out = tmp_path / "out"
    assert main(["export", str(run.run_dir), str(out), "--step", "best"]) == 0
    assert "wrote version 4 of" in capsys.readouterr().out
    # Where it raised is in the file that the console names.
    assert f"traceback in {run.run_dir}/user_errors.log" in said
    assert f"tracebacks in {run.run_dir}/user_errors.log" in said
    text = (run.run_dir / "user_errors.log").read_text()
    assert "LookupError: the table is gone" in text and "in score" in text
    assert run.summary()["num_user_errors"] == 6
    # A share above the limit is a failed evaluation, in `eval` too.
    argv = ["eval", str(run.run_dir), "evaluation.failed_share_max=0.1"]
    assert main(argv) == 1
    assert "failed: 2 of 16 answers failed" in capsys.readouterr().out


@pytest.mark.full
def test_a_run_directory_that_is_deleted_ends_the_run_with_one_line(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, orchestration__num_steps=ENDLESS)
    process = run.start()
    wait_until("the first step", lambda: bool(run.steps()), process)
    shutil.rmtree(run.run_dir, ignore_errors=True)
    said = finish(process, STOPPED)
    assert "was deleted or moved while the run was going on" in said
    assert "Traceback" not in said and "go on with" not in said


LOSS = """
def inner(inputs):
    if inputs.num_sequences > 4:  # not on the small batches that it is tried with before the start
        return inputs.no_such_field
    return -inputs.logprobs_T * inputs.advantages_T

def loss(inputs, options):
    return inner(inputs)
"""


@pytest.mark.full
def test_the_traceback_of_a_loss_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOSS)
    run = tiny_run(tmp_path, algorithm__loss=f"{tmp_path}/mine.py:loss", rollout__num_instances=1)
    said = run.train(status=STOPPED)
    assert "no_such_field" in said and f"tracebacks in {run.run_dir}/user_errors.log" in said
    text = (run.run_dir / "user_errors.log").read_text()
    assert "in inner" in text and "algorithm.loss" in text and "(learner)" in text
