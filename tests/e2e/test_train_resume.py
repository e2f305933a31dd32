"""Stopped and continued: signals, resume, changed K and B, the optimizer, the last step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dora_rl.config import WeightsConfig
from dora_rl.core.actions import EndGroup, InForce, IssueGroup, OptimizerRewound
from dora_rl.core.events import LearnerJoined, Resumed
from dora_rl.weights.store import shared_memory_root
from tests.kit.tiny_runs import ENDLESS, STOPPED, TinyRun, finish, tiny_run, wait_until, workers_of

# Long responses (the model never stops by itself), so that a signal finds some under way.
LONG = {
    "rollout__ignore_eos": True,
    "rollout__tokens_max": 400,
    "rollout__num_instances": 1,
    "rollout__journal_steps": 1,
    "orchestration__inflight_groups": 8,
    "orchestration__ready_max": 8,
}


def stop_after_step(run: TinyRun, number: int, *arguments: str, step: int = 0) -> str:
    process = run.start(*arguments)
    wait_until(f"step {step}", lambda: step in run.steps(), process)
    process.send_signal(number)
    said = finish(process, STOPPED)
    assert not workers_of(run.run_dir)
    return said


def journaled(run: TinyRun) -> int:
    return sum(path.stat().st_size for path in (run.run_dir / "journal").glob("*.jsonl"))


def test_a_signal_stops_and_resume_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, orchestration__num_steps=ENDLESS, **LONG)
    process = run.start()
    wait_until("step 0", lambda: 0 in run.steps(), process)
    size = journaled(run)
    wait_until("tokens of the next groups", lambda: journaled(run) > size + 4000, process)
    process.send_signal(signal.SIGTERM)
    said = finish(process, STOPPED)
    assert "stopped: interrupted" in said and "--resume" in said
    assert not workers_of(run.run_dir)
    assert not shared_memory_root(WeightsConfig(), run.run_dir).exists(), "given back"
    num_steps = run.steps_enough()
    to_the_end = ("--resume", f"orchestration.num_steps={num_steps}")
    run.train(*to_the_end)

    report = run.proven()
    assert report.figures.finished and report.figures.steps == num_steps
    assert report.figures.groups_trained == 4 * num_steps and report.figures.groups_failed == 0
    assert run.steps() == list(range(num_steps)), "each step has one line"
    rows = {(row["group"], row["sample"]): row for row in run.lines("rollouts.jsonl")}
    assert len(rows) == len(run.lines("rollouts.jsonl")) == 16 * num_steps
    continued = [line for line in run.lines("continued.jsonl") if line["token_ids"]]
    assert continued, "something was in flight and went on from its journal"
    for line in continued:
        row = rows[line["group"], line["sample"]]
        assert line["journal_version"] == line["version"] == row["version"]
        assert row["token_ids"][: len(line["token_ids"])] == line["token_ids"]
    summary = run.summary()
    assert summary["num_resumes"] == 1 and summary["steps"] == num_steps
    assert summary["tokens_trained"] == sum(r["num_tokens"] for r in rows.values())

    before = len(run.entries())
    run.train(*to_the_end)  # nothing is left to do
    assert run.summary()["tokens_trained"] == summary["tokens_trained"]
    assert run.steps() == list(range(num_steps))
    assert len(run.entries()) == before + 1
    run.proven()


def test_staleness_and_batch_may_change_on_resume(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, orchestration__num_steps=ENDLESS, **LONG)
    stop_after_step(run, signal.SIGINT)
    kept = (run.run_dir / "config.json").read_text()
    committed = len(run.steps())
    if len(_outstanding(run)) > 4:  # more than one step can take
        said = run.train("--resume", f"orchestration.num_steps={committed + 1}", status=2)
        assert "too few" in said
    assert (run.run_dir / "config.json").read_text() == kept
    num_steps = run.steps_enough() + 2  # the last ones under the new K and B
    run.train(
        "--resume",
        "orchestration.max_staleness=1",
        "orchestration.batch_groups=3",
        f"orchestration.num_steps={num_steps}",
    )
    assert run.proven().figures.finished
    entries = run.entries()
    resumed = next(i for i, entry in enumerate(entries) if isinstance(entry.event, Resumed))
    forced = [a for e in entries[resumed:] for a in e.actions if isinstance(a, InForce)]
    assert (forced[-1].max_staleness, forced[-1].batch_groups) == (1, 3)
    sizes: dict[int, set[int]] = {}
    for row in run.lines("rollouts.jsonl"):
        sizes.setdefault(row["step"], set()).add(row["group"])
        if row["step"] >= forced[-1].step:
            assert row["step"] - row["version"] <= 1
    assert len(sizes[0]) == 4
    assert {len(sizes[step]) for step in range(forced[-1].step, num_steps)} == {3}


def test_a_clean_end_keeps_the_optimizer_whatever_the_checkpoints(tmp_path: Path) -> None:
    sparse = {"orchestration__num_steps": ENDLESS, "checkpoint__every_steps": ENDLESS}
    run = tiny_run(tmp_path, **sparse, **LONG)
    stop_after_step(run, signal.SIGTERM)
    num_steps = run.steps_enough()
    said = run.train("--resume", "logging.progress=true", f"orchestration.num_steps={num_steps}")
    assert "optimizer" not in said
    entries = run.entries()
    assert not any(isinstance(a, OptimizerRewound) for e in entries for a in e.actions)
    joined = [e.event for e in entries if isinstance(e.event, LearnerJoined)]
    assert joined[-1].optimizer_version == joined[-1].version >= 1
    assert run.proven().figures.steps == num_steps
    assert run.steps() == list(range(num_steps))


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, orchestration__num_steps=ENDLESS, runtime__grace_s=600.0, **LONG)
    process = run.start()
    wait_until("step 0", lambda: 0 in run.steps(), process)
    worker = next(pid for pid in workers_of(run.run_dir) if pid != process.pid)
    os.kill(
        worker, signal.SIGSTOP
    )  # a worker that does not answer: only the second signal ends this
    process.send_signal(signal.SIGTERM)
    wait_until("the stop in the log", lambda: "interrupted" in _log_text(run), process)
    process.send_signal(signal.SIGTERM)
    finish(process, 130)
    wait_until("the workers' end", lambda: not workers_of(run.run_dir))
    run.proven()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.num_samples=2", "rollout.num_samples was 4 and cannot become 2"),
        ("runtime.seed=7", "runtime.seed was 0 and cannot become 7"),
    ],
)
def test_what_decides_the_tokens_may_not_change(stopped: TinyRun, override: str, line: str) -> None:
    assert line in stopped.train("--resume", override, status=2)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = tiny_run(tmp_path_factory.mktemp("stopped"), orchestration__num_steps=1)
    run.train()
    return run


def _outstanding(run: TinyRun) -> set[int]:
    """Groups that still need a place; those of a step that is not on disk yet have had theirs."""
    issued: set[int] = set()
    for entry in run.entries():
        for action in entry.actions:
            if isinstance(action, IssueGroup):
                issued.add(action.group)
            elif isinstance(action, EndGroup):
                issued.remove(action.group)
    return issued - {row["group"] for row in run.lines("rollouts.jsonl")}


def _log_text(run: TinyRun) -> str:
    return "".join(path.read_text() for path in (run.run_dir / "events").glob("*.jsonl"))
