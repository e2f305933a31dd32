"""Real runs with a poison prompt, a prompt that kills its engine, and instances that die young.

Each ends with only the bad prompt set aside. The engine is killed from outside: whoever is given
the bad prompt is ended with SIGKILL as soon as the log says so, which is what a prompt that ends
its process does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.eventlog import Entry, parse_line
from tests.kit.tiny_runs import RUN_S_MAX, STOPPED, TinyRun, finish, pid_of, slow_twin, tiny_run

POISON = """
def reward(completion, answer):
    if answer == {bad!r}:
        raise KeyError("no such answer")
    return float(len(completion) % 3)
"""


def prompts_set_aside(run: TinyRun) -> set[int]:
    """As the summary says, which the audit's count must confirm."""
    report = run.proven()
    named = {one["prompt"] for one in run.summary()["set_aside"]}
    assert named == set(report.figures.set_aside)
    return named


def failed_prompts(run: TinyRun) -> set[int]:
    actions = [action for entry in run.entries() for action in entry.actions]
    prompts = {a.group: a.prompt for a in actions if isinstance(a, act.IssueGroup)}
    ends = [a for a in actions if isinstance(a, act.EndGroup) and a.end is act.End.FAILED]
    return {prompts[end.group] for end in ends}


def entries_as_they_come(run: TinyRun, process: subprocess.Popen[str]) -> Iterator[Entry]:
    """Follow the log of a run until it ends. Its segments grow, and new ones are begun."""
    offsets: Counter[Path] = Counter()
    until = time.monotonic() + RUN_S_MAX
    while process.poll() is None:
        assert time.monotonic() < until, "the run does not end"
        for path in sorted((run.run_dir / "events").glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(offsets[path])
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # in the writing
                    offsets[path] += len(line)
                    record = parse_line(line)
                    if isinstance(record, Entry):
                        yield record
        time.sleep(0.01)


def kill(run: TinyRun, name: str) -> None:
    with contextlib.suppress(ProcessLookupError, AssertionError):  # it is gone already
        os.kill(pid_of(run, name), signal.SIGKILL)


def dispatched(entry: Entry, prompt: int) -> list[str]:
    """The instances that are given this prompt."""
    orders = [a for a in entry.actions if isinstance(a, act.Dispatch)]
    return [order.instance for order in orders if order.prompt == prompt]


def test_a_prompt_whose_reward_always_raises_is_set_aside(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40)))
    code = tmp_path / "poison.py"
    code.write_text(POISON.format(bad="4"))
    run = tiny_run(
        tmp_path,
        data__train=[{"path": str(rows)}],
        data__shuffle=False,
        reward__functions=[f"{code}:reward"],
        rollout__tokens_max=16,
        rollout__num_instances=1,
        orchestration__num_steps=8,
    )
    said = run.train()
    bad = 3
    assert prompts_set_aside(run) == {bad}
    assert failed_prompts(run) == {bad}
    assert f"set aside: prompt {bad}" in said and "no such answer" in said
    assert run.steps() == list(range(8))


@pytest.mark.kills
@pytest.mark.full
def test_a_prompt_that_kills_its_engine_is_set_aside_and_nobody_else(tmp_path: Path) -> None:
    """Its prompt is so long that its instance is killed before its first token, each time."""
    bad, rows = 2, tmp_path / "rows.jsonl"
    prompts = ["+".join("1" * (240 if n == bad else 2)) + "=" for n in range(40)]
    rows.write_text("".join(f'{{"prompt": "{p}", "answer": "2"}}\n' for p in prompts))
    run = tiny_run(
        tmp_path,
        model__path=str(slow_twin(tmp_path / "slow", num_layers=64)),
        data__train=[{"path": str(rows)}],
        data__shuffle=False,
        rollout__tokens_max=16,
        rollout__step_tokens_max=16,
        orchestration__num_steps=6,
        orchestration__attempts_max=2,
    )
    process = run.start()
    for entry in entries_as_they_come(run, process):
        for name in dispatched(entry, bad):
            kill(run, name)
    finish(process)
    assert prompts_set_aside(run) == failed_prompts(run) == {bad}
    losses = [e.event for e in run.entries() if isinstance(e.event, ev.InstanceLost)]
    assert losses and "SIGKILL" in losses[0].reason
    assert run.steps() == list(range(6))


@pytest.mark.kills
@pytest.mark.full
def test_responses_outlive_their_instances(tmp_path: Path) -> None:
    """Instances live for a fifth of a response; a loss is no attempt while tokens are gained."""
    num_tokens, attempts_max = 450, 2
    run = tiny_run(
        tmp_path,
        model__path=str(slow_twin(tmp_path / "slow", num_layers=64)),
        rollout__tokens_max=num_tokens,
        rollout__ignore_eos=True,
        rollout__num_instances=1,
        orchestration__num_steps=1,
        orchestration__batch_groups=2,
        orchestration__max_staleness=0,
        orchestration__attempts_max=attempts_max,
    )
    process, num_kills = run.start(), 0
    for entry in entries_as_they_come(run, process):
        event = entry.event
        if isinstance(event, ev.InstanceReport) and event.decode_steps >= num_tokens // 5:
            kill(run, event.instance)
            num_kills += 1
    finish(process)
    assert prompts_set_aside(run) == failed_prompts(run) == set()
    rows = run.lines("rollouts.jsonl")
    assert [row["num_tokens"] for row in rows] == [num_tokens] * 8
    continued = Counter((c["group"], c["sample"]) for c in run.lines("continued.jsonl"))
    assert max(continued.values()) > attempts_max


@pytest.mark.kills
@pytest.mark.full
def test_a_learner_that_dies_three_times_in_one_step_stops_the_run_resumably(
    tmp_path: Path,
) -> None:
    run = tiny_run(tmp_path, orchestration__num_steps=2)
    process = run.start()
    for entry in entries_as_they_come(run, process):
        if isinstance(entry.event, ev.LearnerJoined):
            kill(run, "learner")
    said = finish(process, STOPPED)
    assert "the learner was lost 3 times in step 0" in said and "SIGKILL" in said
    run.train("--resume")
    assert run.steps() == [0, 1]
    run.proven()
