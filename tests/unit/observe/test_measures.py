"""One definition of tokens trained, tokens/s, start-up and idle, wherever they are shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dora_rl.commands.progress import step_line
from dora_rl.commands.train import report_lines
from dora_rl.controller.records import Records, TrainedSample
from dora_rl.dashboard.documents import throughput, token_figures
from dora_rl.dashboard.run_files import RunFiles
from dora_rl.io.append_log import read_lines
from dora_rl.observe.history import History
from dora_rl.observe.measures import WINDOW_STEPS, smoothed_rates
from dora_rl.weights.store import DiskWeightStore


def sample(num_tokens: int, turns: list[tuple[int, int, int]] | None = None) -> TrainedSample:
    return TrainedSample(
        group=0,
        sample=0,
        version=0,
        num_prompt=100,
        num_tokens=num_tokens,
        reward=1.0,
        finish="stop",
        text="",
        prompt="",
        segments=1,
        logprobs=[],
        logprob_sum=-1.0,
        token_ids=[],
        turns=turns or [(0, num_tokens, 1)],
    )


def test_tokens_trained_are_those_that_the_policy_wrote(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    turns = [(0, 4, 1), (4, 54, 0), (54, 60, 1)]
    line = records.step(0, {}, [sample(7), sample(60, turns)], {})
    assert line["tokens_trained"] == 7 + 10
    assert line["num_tokens"] == 7 + 60 + 200  # what the learner read
    summary = records.summary("sync", 1, "done", 2)
    records.close()
    assert summary["tokens_trained"] == 17
    assert summary["tokens_per_s"] == pytest.approx(17 / line["time/step"])
    # The dashboard reads the same files.
    files = RunFiles(tmp_path)
    files.follow()
    empty = History()
    shown = token_figures(empty, files, empty.groups["end"] >= 0)
    assert shown["tokens_trained"] == 17
    assert shown["tokens_per_s"] == pytest.approx(summary["tokens_per_s"])


def test_lines_of_the_last_release_are_counted_by_the_same_definition(tmp_path: Path) -> None:
    old = {"step": 0, "num_tokens": 500, "num_samples": 4, "response_length/mean": 25.0}
    old |= {"staleness/mean": 0.0, "staleness/max": 0, "mixed_version_frac": 0.0}
    old |= {"reward/mean": 0.5, "time/step": 10.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    (tmp_path / "totals.json").write_text(json.dumps({"wall_s": 12.0, "num_resumes": 0}) + "\n")
    summary = Records(tmp_path, rollouts=False, committed=1).summary("sync", 1, "stopped", 2)
    assert summary["tokens_trained"] == 100
    assert summary["tokens_per_s"] == pytest.approx(10.0)


def test_the_rate_of_a_step_is_that_of_the_last_steps() -> None:
    # Steps that are committed in bursts: by themselves 100 and 100,000 tokens/s.
    tokens, seconds = [1000.0] * 40, [10.0, 0.01] * 20
    rates = [rate for rate in smoothed_rates(tokens, seconds)[WINDOW_STEPS:] if rate is not None]
    assert min(rates) == pytest.approx(max(rates), rel=0.01) == pytest.approx(199.8, rel=0.01)


def test_the_line_of_a_step_has_the_smoothed_rate(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    lines = [records.step(step, {}, [sample(100)], {}) for step in range(3)]
    took = sum(line["time/step"] for line in lines)
    assert lines[2]["perf/tokens_per_s"] == pytest.approx(300 / took)
    records.close()
    again = Records(tmp_path, rollouts=False, committed=3)  # and goes on after a resume
    line = again.step(3, {}, [sample(100)], {})
    took += line["time/step"]
    assert line["perf/tokens_per_s"] == pytest.approx(400 / took)


def test_guessed_tokens_are_those_since_the_line_before(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    assert not any(name.startswith("draft/") for name in records.step(0, {}, [sample(9)], {}))
    records.drafts(40, 30)
    records.drafts(2, 0)
    line = records.step(1, {}, [sample(9)], {})
    assert (line["draft/drafted"], line["draft/accepted"]) == (42, 30)
    records.close()
    again = Records(tmp_path, rollouts=False, committed=2)
    again.drafts(10, 5)
    line = again.step(2, {}, [sample(9)], {})
    assert (line["draft/drafted"], line["draft/accepted"]) == (10, 5)
    summary = again.summary("sync", 3, "stopped", 2)
    assert (summary["drafted_tokens"], summary["accepted_tokens"]) == (52, 35)


def test_start_up_is_no_part_of_the_first_step(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    records.began -= 50.0  # as if the workers had taken so long to start
    records.step_began -= 50.0
    records.work_begins()
    records.work_begins()  # later work changes nothing
    line = records.step(0, {}, [sample(10)], {})
    summary = records.summary("sync", 1, "done", 2)
    assert line["time/step"] < 10.0
    assert 50.0 <= summary["startup_s"] < 60.0
    assert summary["training_s"] == pytest.approx(line["time/step"])
    assert summary["wall_s"] >= 50.0


def test_idle_is_measured_over_the_training_time_or_is_not_known(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    nothing = records.summary("sync", 0, "cut off", 2)
    assert nothing["trainer_idle_ratio"] is None and nothing["rollout_idle_ratio"] is None
    assert nothing["tokens_per_s"] is None
    records.step_began -= 100.0
    line = records.step(0, {}, [sample(10)], {})
    records.usage("learner", 0, 25.0, 1.0)
    records.usage("instance0", 0, 50.0, 1.0)
    summary = records.summary("sync", 1, "done", 2)
    assert summary["trainer_idle_ratio"] == pytest.approx(1 - 25 / line["time/step"])
    assert summary["rollout_idle_ratio"] == pytest.approx(1 - 50 / line["time/step"])
    # On a CPU no device idles; what is not used of the cores is called that.
    assert summary["device_idle_ratio"] is None
    assert 0 <= summary["cpu_unused_ratio"] <= 1
    assert records.summary("sync", 1, "done", 0)["cpu_unused_ratio"] is None


def test_time_of_a_step_that_was_cut_short_counts(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    records.work_begins()
    line = records.step(0, {}, [sample(100)], {})
    records.step_began -= 30.0
    records.cut_short()
    records.summary("sync", 1, "interrupted", 2)
    records.close()
    again = Records(tmp_path, rollouts=False, committed=1)
    summary = again.summary("sync", 1, "interrupted", 2)
    assert summary["training_s"] == pytest.approx(line["time/step"] + 30.0, abs=5.0)


def test_a_small_learning_rate_is_not_shown_as_zero(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    line = records.step(0, {"lr": 9.999999974752427e-07}, [sample(10)], {})
    records.close()
    assert next(iter(read_lines(tmp_path / "metrics.jsonl")))["lr"] == 1e-06
    assert "lr 1e-06" in step_line(line)


def test_the_end_of_a_run_says_failed_and_names_the_best(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    records.step(0, {}, [sample(10)], {})
    counts = {"num_answers": 80.0, "num_failed": 80.0, "failure": "ValueError: boom"}
    records.evaluation(0, {"greedy": 0.5, "sampled": 0.25})
    records.evaluation(1, {"greedy": None, "sampled": None, **counts})
    summary = records.summary("sync", 1, "all steps are trained", 2)
    assert summary["best"] == {"version": 0, "metric": "eval/greedy", "value": 0.5}
    lines = report_lines(tmp_path, summary)
    assert "held-out greedy        0.500 -> failed" in lines
    assert "last evaluation: 80 of 80 answers failed: ValueError: boom" in lines
    assert any(line.startswith("best version 0 (eval/greedy 0.500)") for line in lines)
    last = list(read_lines(tmp_path / "metrics.jsonl"))[-1]
    assert last["eval/greedy"] is None and last["eval/num_failed"] == 80


def test_a_run_whose_samples_were_cut_off_says_so(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    records.step(0, {"truncated_frac": 1.0}, [sample(10)], {})
    records.step(1, {"truncated_frac": 0.4}, [sample(10)], {})
    few = report_lines(tmp_path, records.summary("sync", 2, "all steps are trained", 2))
    records.step(2, {"truncated_frac": 0.75}, [sample(10)], {})
    many = report_lines(tmp_path, records.summary("sync", 3, "all steps are trained", 2))
    records.close()
    assert not any("cut off" in line for line in few)
    assert many[-1].startswith("75% of the samples of the last step were cut off")


def test_weights_that_are_gone_are_not_offered_for_export(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    records.step(0, {}, [sample(10)], {})
    records.evaluation(3, {"greedy": 0.5})
    summary = records.summary("sync", 1, "all steps are trained", 2)
    records.close()
    (best,) = [line for line in report_lines(tmp_path, summary) if line.startswith("best")]
    assert best == "best version 3 (eval/greedy 0.500): its weights are gone"
    DiskWeightStore(tmp_path / "weights").publish(3, [("w", torch.zeros(2))], None)
    (best,) = [line for line in report_lines(tmp_path, summary) if line.startswith("best")]
    assert best.endswith("--step best")
    shutil.rmtree(tmp_path / "weights")
    trainer = tmp_path / "checkpoints" / "step_000002" / "trainer"
    trainer.mkdir(parents=True)
    (trainer / "state.json").write_text("{}")
    (best,) = [line for line in report_lines(tmp_path, summary) if line.startswith("best")]
    assert best.endswith("--step best")


def test_samples_that_failed_in_trained_groups_are_told_and_their_tokens_discarded(
    tmp_path: Path,
) -> None:
    records = Records(tmp_path, rollouts=False)
    records.totals.discarded_tokens = 100  # of a group that failed
    records.step(0, {}, [sample(10)], {}, (2, 30))
    records.step(1, {}, [sample(10)], {})
    summary = records.summary("sync", 2, "all steps are trained", 2)
    records.close()
    assert (summary["samples_trained"], summary["samples_failed"]) == (2, 2)
    assert summary["discarded_tokens"] == 130
    assert "samples: 2 trained + 2 failed in trained groups" in report_lines(tmp_path, summary)
    again = Records(tmp_path, rollouts=False, committed=2).summary("sync", 2, "stopped", 2)
    assert (again["samples_failed"], again["discarded_tokens"]) == (2, 130)
    lines = report_lines(tmp_path, summary | {"samples_failed": 0})
    assert not any(line.startswith("samples:") for line in lines)


def test_the_dashboard_has_the_idle_shares_of_the_summary(tmp_path: Path) -> None:
    records = Records(tmp_path, rollouts=False)
    records.step_began -= 100.0
    records.usage("learner", 0, 25.0, 1.0)
    records.usage("instance0", 0, 50.0, 1.0)
    records.step(0, {}, [sample(10)], {})
    summary = records.summary("sync", 1, "done", 2)
    records.close()
    files = RunFiles(tmp_path)
    files.follow()
    spans = {name: np.zeros(0) for name in ("begin", "end")}
    found = throughput(History(), files, spans | {"instance": np.zeros(0, dtype=np.int64)})
    assert found["trainer_idle"] == pytest.approx(summary["trainer_idle_ratio"])
    assert found["rollout_idle"] == pytest.approx(summary["rollout_idle_ratio"])
    assert found["cpu_unused"] == summary["cpu_unused_ratio"] and found["device_idle"] is None
