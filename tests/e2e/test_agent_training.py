"""A run whose turns come from an agent over HTTP, through the real `openai` client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dora_rl.data.chains import digits, final_window, reward
from dora_rl.setup.tokenizer import open_tokenizer
from tests.kit.places import ROOT
from tests.kit.tiny_runs import (
    ENDLESS,
    TinyRun,
    finish,
    pid_of,
    tiny_run,
    wait_until,
    workers_of,
)

pytest.importorskip("openai")

AGENT = f"{Path(__file__).parent / 'chain_agent.py'}:agent"
TOKENIZER = open_tokenizer(ROOT / "recipes" / "models" / "tiny", False)


def agent_run(folder: Path, **settings: Any) -> TinyRun:
    return tiny_run(
        folder,
        reward__functions=[],
        env__environments=[{"name": "agent", "options": {"agent": AGENT}, "turns_max": 2}],
        orchestration__num_steps=2,
        **settings,
    )


@pytest.mark.full
def test_an_openai_agent_is_trained(tmp_path: Path) -> None:
    chains = {"path": "dora_rl.data.tasks:Chains", "options": {"num_steps_max": 12}}
    run = agent_run(tmp_path, data__eval=[chains], evaluation__num_prompts=6)
    run.train()
    report = run.proven()
    assert report.figures.groups_trained == 8
    rows = run.lines("rollouts.jsonl")
    assert len(rows) == 8 * 4
    two_turns = [row for row in rows if len(row["turns"]) == 3]
    assert two_turns, "a wrong first answer is followed by a second request"
    for row in rows:
        assert_is_what_the_agent_saw(row)
    rewards = {row["reward"] for row in rows}
    assert rewards <= {1.0, 0.25, 0.0} and len(rewards) > 1
    assert run.summary()["mixed_version_frac"] == 0


def assert_is_what_the_agent_saw(row: dict[str, Any]) -> None:
    """Turns of the policy, the user's words between them, and the reward of the last turn."""
    texts = [
        (TOKENIZER.decode(row["token_ids"][start:end], skip_special_tokens=True), mask)
        for start, end, mask in row["turns"]
    ]
    written = [text for text, mask in texts if mask]
    assert [mask for _, mask in texts] == [1, 0, 1][: len(texts)]
    if len(texts) == 3:
        assert texts[1][0] == row["prompt"]
    num_steps, _, window = row["prompt"].strip().partition(":")
    answer = digits(final_window(tuple(map(int, window)), int(num_steps)))
    right = [bool(reward(text, answer)) for text in written]
    if row["reward"] == 1.0:
        assert right == [True]
    else:
        assert right == [False, row["reward"] == 0.25]


FORKING = ROOT / "tests" / "kit" / "forking_agents.py"


def forking_run(folder: Path, function: str, **settings: Any) -> TinyRun:
    """Seven requests an episode, in five histories or more."""
    agent = {"name": "agent", "options": {"agent": f"{FORKING}:{function}"}, "turns_max": 9}
    return tiny_run(
        folder,
        reward__functions=[],
        env__environments=[agent],
        rollout__tokens_max=12,
        algorithm__advantage="turn",
        algorithm__skip_zero_advantage=False,
        algorithm__old_logprobs="behaviour",
        **settings,
    )


def assert_each_token_is_trained_once(run: TinyRun, num_steps: int) -> None:
    """From the instances' count to the learner's: nothing twice, nothing lost, in each step."""
    report = run.proven()
    assert report.figures.steps == num_steps
    rows = run.lines("rollouts.jsonl")
    assert len({(row["group"], row["sample"]) for row in rows}) == len(rows) == num_steps * 16
    for row in rows:
        assert len(row["branches"]) > 3 and row["segments"] == 1
        assert sum(mask for _, _, mask in row["turns"]) == len(row["turn_rewards"]) == 7
        assert row["reward"] == sum(row["turn_rewards"])
    lines = [line for line in run.lines("metrics.jsonl") if "step" in line]
    for line in lines:
        mine = [row for row in rows if row["step"] == line["step"]]
        written = sum(end - start for row in mine for start, end, mask in row["turns"] if mask)
        assert line["train/tokens_written"] == line["tokens_trained"] == written
        assert line["train/rows"] > len(mine) and line["update/applied"] == 1
        assert line["mismatch_abs"] < 1e-3, "each token behind the history that it was drawn from"


@pytest.mark.full
@pytest.mark.parametrize("function", ["with_openai", "with_anthropic"])
def test_an_agent_that_forks_is_trained(tmp_path: Path, function: str) -> None:
    run = forking_run(tmp_path, function, orchestration__num_steps=2, audit__recompute_share=1.0)
    run.train()
    assert_each_token_is_trained_once(run, 2)
    summary = run.summary()
    # What the instances generated was trained, but for episodes that were left over at the end.
    trained = sum(line["tokens_trained"] for line in run.lines("metrics.jsonl") if "step" in line)
    assert summary["tokens_generated"] - summary["discarded_tokens"] >= trained
    command = [sys.executable, "-m", "dora_rl.cli", "audit", str(run.run_dir)]
    files = subprocess.run(
        [*command, "--files", "--recompute", "8"], capture_output=True, text=True
    )
    assert files.returncode == 0, files.stdout + files.stderr


@pytest.mark.kills
@pytest.mark.full
def test_a_forking_agent_survives_kills(tmp_path: Path) -> None:
    """Its worker, an instance, then the whole run, which is resumed: the same counts."""
    run = forking_run(
        tmp_path,
        "with_openai",
        rollout__journal_steps=1,
        orchestration__num_steps=ENDLESS,
        orchestration__attempts_max=100,
    )
    process = run.start()
    for step, name in enumerate(("env0", "instance1")):
        wait_until(f"step {step}", lambda step=step: step in run.steps(), process)
        os.kill(pid_of(run, name), signal.SIGKILL)
    wait_until("step 2", lambda: 2 in run.steps(), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until("the workers' end", lambda: not workers_of(run.run_dir))
    num_steps = run.steps_enough()
    finish(run.start("--resume", f"orchestration.num_steps={num_steps}"))
    assert_each_token_is_trained_once(run, num_steps)
    continued = [line for line in run.lines("continued.jsonl") if line["token_ids"]]
    assert continued, "an episode went on from its journal"
