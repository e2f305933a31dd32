"""A short real training of every mode: it ends, the audit is clean, the replay is equal."""

from __future__ import annotations

import json
import tempfile
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dora_rl.core.actions import End
from tests.kit.tiny_runs import TinyRun, finish, slow_twin, start_together, tiny_run, wait_until

# Staleness that a mode may have. `partial` counts from the version a group was begun on.
STALENESS_MAX = {"one_step_off": 1, "partial": 2, "replication": 0, "multi_version": 2}


def assert_sound(run: TinyRun, num_steps: int, batch_groups: int = 4) -> dict[str, Any]:
    figures = run.proven().figures
    assert figures.finished
    assert figures.steps == num_steps
    assert figures.groups_trained == num_steps * batch_groups
    assert run.steps() == list(range(num_steps))
    rollouts = run.lines("rollouts.jsonl")
    assert len(rollouts) == num_steps * batch_groups * 4
    assert all(len(row["token_ids"]) == row["num_tokens"] for row in rollouts)
    summary = run.summary()
    assert summary["steps"] == num_steps
    assert summary["tokens_trained"] == sum(r["num_tokens"] for r in rollouts)
    assert not list((run.run_dir / "journal").glob("*.new"))
    return summary


@pytest.mark.parametrize("mode", list(STALENESS_MAX))
def test_every_mode_trains_and_is_proven(tmp_path: Path, mode: str) -> None:
    run = tiny_run(tmp_path, orchestration__mode=mode, orchestration__num_steps=3)
    run.train()
    summary = assert_sound(run, 3)
    assert summary["mode"] == mode
    assert summary["staleness_max"] <= STALENESS_MAX[mode]
    if mode != "partial":
        assert summary["mixed_version_frac"] == 0
        assert {len(row["token_ids"]) > 0 for row in run.lines("rollouts.jsonl")} == {True}
    if mode != "replication":
        assert summary["discarded_tokens"] == 0
    start = _start()
    assert any((tensor != start.get(name, tensor)).any() for name, tensor in run.weights(3).items())


def test_one_seat_instances_flip_and_migrate(tmp_path: Path) -> None:
    """Instances that hold one version each: requests move between processes with their KV."""
    run = tiny_run(
        tmp_path,
        model__path=str(slow_twin(tmp_path / "slow")),
        rollout__versions_max=1,
        rollout__tokens_max=448,
        rollout__seqs_max=24,  # so few that both instances have requests
        rollout__compiled_kernels=False,
        orchestration__num_steps=6,
        orchestration__report_timeout_s=600.0,
        # Four steps' worth under way and a long tail: the learner is done with the four shortest
        # groups before the longest of sixteen have ended, on a slow machine too.
        orchestration__max_staleness=3,
        orchestration__inflight_groups=16,
        orchestration__ready_max=16,
        data__train=[
            {
                "path": "dora_rl.data.tasks:Chains",
                "options": {"num_steps_median": 16.0, "num_steps_sigma": 1.0},
            }
        ],
    )
    finish(start_together(run))
    summary = assert_sound(run, 6)
    assert summary["migrations"] > 0
    assert summary["kv_bytes_moved"] > 0
    assert summary["mixed_version_frac"] == 0
    assert summary["discarded_tokens"] == 0
    assert summary["staleness_max"] <= 3


def test_multi_version_with_no_staleness_is_sync(tmp_path: Path) -> None:
    """Same trajectories, token for token, and in canonical order the same weights."""
    settings = {"trainer__canonical_order": True, "trainer__lr": 1e-3}
    sync = tiny_run(tmp_path / "sync", orchestration__mode="sync", **settings)
    multi = tiny_run(
        tmp_path / "multi",
        orchestration__mode="multi_version",
        orchestration__max_staleness=0,
        **settings,
    )
    for run in (sync, multi):
        run.train()
        assert assert_sound(run, 3)["staleness_max"] == 0
    first, second = (_by_place(run) for run in (sync, multi))
    assert first.keys() == second.keys()
    for place, row in first.items():
        assert row["token_ids"] == second[place]["token_ids"], place
        assert row["reward"] == second[place]["reward"], place
        # The weights of later versions agree to rounding, and so do their log-probs.
        assert row["logprob_sum"] == pytest.approx(second[place]["logprob_sum"], abs=1e-3), place
    one, other, start = sync.weights(3), multi.weights(3), _start()
    for name, tensor in one.items():
        np.testing.assert_allclose(tensor, other[name], atol=1e-5, rtol=0, err_msg=name)
    moved = max(float(np.abs(one[name] - start[name]).max()) for name in start)
    assert moved > 1e-4, "the comparison would not notice a run that trains nothing"


def test_without_a_learning_rate_nothing_changes(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path, trainer__lr=0.0, orchestration__num_steps=2, orchestration__mode="sync"
    )
    run.train()
    assert_sound(run, 2)
    start = _start()
    for name, tensor in run.weights(2).items():
        np.testing.assert_array_equal(tensor, start.get(name, tensor), err_msg=name)


def test_a_learner_in_bfloat16_on_a_cpu_has_instances_in_bfloat16(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, trainer__compute_dtype="bfloat16", rollout__num_instances=1)
    run.train("orchestration.num_steps=1", "trainer.lr=0")
    assert_sound(run, 1)
    assert json.loads((run.run_dir / "config.json").read_text())["rollout"]["dtype"] is None


def test_engine_and_learner_agree_on_log_probs_at_another_temperature(tmp_path: Path) -> None:
    code = tmp_path / "longer.py"
    code.write_text("def longer(completion, answer):\n    return float(len(completion))\n")
    run = tiny_run(
        tmp_path,
        rollout__temperature=0.5,
        reward__functions=[f"{code}:longer"],
        orchestration__mode="sync",
        orchestration__num_steps=1,
    )
    run.train()
    (line,) = run.lines("metrics.jsonl")
    assert line["mismatch_abs"] < 1e-3
    assert line["clip_ratio/low"] == line["clip_ratio/high"] == 0


def test_filtered_groups_are_replaced_and_strangers_are_refused(tmp_path: Path) -> None:
    """Every group with equal rewards ends as filtered; the batches are full all the same.

    Meanwhile somebody who does not know the run's key tries to join.
    """
    run = tiny_run(tmp_path, orchestration__filter_equal=True, orchestration__num_steps=2)
    with tempfile.TemporaryDirectory(prefix="e2e-", dir="/tmp") as home:
        process = run.start(TMPDIR=home)
        wait_until("the socket", lambda: any(Path(home).glob("*/controller")), process)
        address = str(next(Path(home).glob("*/controller")))
        for _ in range(3):
            with pytest.raises((AuthenticationError, EOFError, OSError)):
                Client(address, family="AF_UNIX", authkey=b"a guess")
        finish(process)
    report = run.proven()
    ends = [
        action.end
        for entry in run.entries()
        for action in entry.actions
        if type(action).__name__ == "EndGroup"
    ]
    assert ends.count(End.TRAINED) == 8
    assert report.figures.groups_filtered == ends.count(End.FILTERED)
    for row in _groups(run).values():
        assert len({sample["reward"] for sample in row}) > 1


def _start() -> dict[str, Any]:
    from tests.kit.tiny_runs import MODEL

    return load_file(MODEL / "model.safetensors")


def _by_place(run: TinyRun) -> dict[tuple[int, int], dict[str, Any]]:
    return {(row["group"], row["sample"]): row for row in run.lines("rollouts.jsonl")}


def _groups(run: TinyRun) -> dict[int, list[dict[str, Any]]]:
    out: dict[int, list[dict[str, Any]]] = {}
    for row in run.lines("rollouts.jsonl"):
        out.setdefault(row["group"], []).append(row)
    return out


def test_forced_lengths_are_the_same_in_every_mode(tmp_path: Path) -> None:
    """And the checkpoint that evaluates best is known by its score."""
    found: list[dict[tuple[int, int], int]] = []
    for mode in ("sync", "multi_version"):
        run = tiny_run(
            tmp_path / mode,
            orchestration__mode=mode,
            orchestration__num_steps=2,
            rollout__forced_length_median=20.0,
            data__eval=["dora_rl.data.tasks:Chains"],
            evaluation__num_prompts=4,
            evaluation__every_steps=1,
        )
        run.train()
        rows = run.lines("rollouts.jsonl")
        assert {row["finish"] for row in rows} == {"length"}
        assert all(row["parts"] == {"dora_rl.data.chains:reward": row["reward"]} for row in rows)
        found.append({(r["group"], r["sample"]): r["num_tokens"] for r in rows})
        evaluations = {
            r["version"]: r["eval/greedy"] for r in run.lines("metrics.jsonl") if "version" in r
        }
        for step in (0, 1):
            score = run.run_dir / "checkpoints" / f"step_{step:06d}" / "trainer" / "score.json"
            assert json.loads(score.read_text())["score"] == evaluations[step + 1]
    sync, multi = found
    assert len(set(sync.values())) > 4
    both = sync.keys() & multi.keys()
    assert both and all(sync[key] == multi[key] for key in both)
