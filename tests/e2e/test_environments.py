"""Multi-turn runs for real: turns, masks and rewards in the records, and workers killed mid-run."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.actions import Action, End, EndGroup, Move, Park
from dora_rl.envs.calculator import CALL, operate
from tests.kit.places import ROOT
from tests.kit.tiny_runs import ENDLESS, TinyRun, finish, pid_of, tiny_run, wait_until, workers_of

MODEL = ROOT / "recipes" / "models" / "tiny_tools"
DATA = [{"path": "dora_rl.envs.calculator:Expressions"}]
CHARACTERS = "\0\0" + "0123456789:=\n" + "\0" + "+-*?<>!"


def tool_run(folder: Path, **settings: Any) -> TinyRun:
    return tiny_run(
        folder,
        model__path=str(MODEL),
        data__train=DATA,
        reward__functions=[],
        rollout__tokens_max=16,
        rollout__stop_ids=[19],
        **settings,
    )


def calculator(**entry: Any) -> list[dict[str, Any]]:
    return [{"name": "calculator", "turns_max": 6, **entry}]


def assert_turns_are_right(row: dict[str, Any]) -> int:
    """Calls by the policy, answers by the tool, nothing between; returns the number of turns."""
    turns, ids = row["turns"], row["token_ids"]
    assert [mask for _, _, mask in turns] == [1, 0] * (len(turns) // 2) + [1]
    assert turns[0][0] == 0 and turns[-1][1] == len(ids)
    texts = ["".join(CHARACTERS[t] for t in ids[start:end]) for start, end, _ in turns]
    for call, answer in zip(texts[::2], texts[1::2], strict=False):
        found = CALL.fullmatch(call)
        result = operate(int(found[1]), found[2], int(found[3])) if found else None
        assert answer == ("!\n" if result is None else f"{result}\n")
    return len(turns) // 2 + 1


def test_a_run_with_a_tool(tmp_path: Path) -> None:
    run = tool_run(
        tmp_path,
        data__eval=DATA,
        evaluation__num_prompts=10,
        env__environments=calculator(latency_s=[0.01, 0.1]),
        orchestration__num_steps=2,
    )
    run.train()
    assert run.proven().figures.groups_trained == 8
    rows = run.lines("rollouts.jsonl")
    assert len(rows) == 32
    assert max(assert_turns_are_right(row) for row in rows) > 1
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    for row in rows:
        assert row["segments"] == 1, "one version over all turns"
    summary = run.summary()
    written = sum(end - begin for row in rows for begin, end, mask in row["turns"] if mask)
    assert summary["tokens_trained"] == written < sum(row["num_tokens"] for row in rows)
    assert summary["tokens_trained"] <= summary["tokens_generated"]
    assert summary["eval_first"]["num_prompts"] == 10 and summary["eval_last"]["num_failed"] == 0
    assert 0 < summary["eval_last"]["greedy"] <= 1


MIXED = '''
from dora_rl.envs.base import Environment, Observation

class Words(Environment):
    """Opens the episode itself, leaves the reward to a function, and fails now and then."""

    opens = True

    def reset(self, row, seed):
        self.broken = seed % 11 == 0
        return Observation("12\\n")

    async def step(self, turn):
        if self.broken:
            raise RuntimeError("a bug in the environment")
        return Observation("34\\n", done=turn.number == 2)

def reward(completion, **columns):
    return float(len(completion) % 3)
'''


@pytest.mark.full
def test_two_environments_one_that_opens_and_fails(tmp_path: Path) -> None:
    code = tmp_path / "words.py"
    code.write_text(MIXED)
    run = tool_run(
        tmp_path,
        env__environments=[
            *calculator(weight=1.0),
            {"name": f"{code}:Words", "label": "words", "weight": 3.0, "concurrent_max": 2},
        ],
        orchestration__num_steps=2,
        orchestration__attempts_max=2,
        orchestration__failed_share_max=1.0,
    )
    data = [{**DATA[0], "env": "calculator"}, {**DATA[0], "env": "words"}]
    run = tiny_like(run, data, f"{code}:reward")
    run.train()
    run.proven()
    rows = run.lines("rollouts.jsonl")
    opened = [row for row in rows if row["turns"][0][2] == 0]
    assert opened and len(opened) < len(rows), "both environments were trained"
    for row in opened:
        assert row["token_ids"][:3] == [3, 4, 14] and row["turns"][0] == [0, 3, 0]
        assert [mask for _, _, mask in row["turns"]] == [0, 1, 0, 1]
        assert row["reward"] == len(row["text"]) % 3
    for row in rows:
        if row["turns"][0][2]:
            assert_turns_are_right(row)


def tiny_like(run: TinyRun, data: list[dict[str, Any]], reward: str) -> TinyRun:
    config = json.loads(run.config.read_text())
    config["data"]["train"] = data
    config["reward"]["functions"] = [reward]
    run.config.write_text(json.dumps(config))
    return run


@pytest.mark.kills
@pytest.mark.full
def test_killed_workers_lose_nothing(tmp_path: Path) -> None:
    """An environment worker, an instance, then the whole run; each while requests wait."""
    run = tool_run(
        tmp_path,
        env__environments=calculator(latency_s=[0.2, 1.0]),
        env__num_workers=2,
        rollout__journal_steps=1,
        rollout__seqs_max=8,
        rollout__versions_max=1,  # so that waiting requests move and park
        orchestration__num_steps=ENDLESS,
        orchestration__attempts_max=100,
    )
    process = run.start()
    for step, name in enumerate(("env0", "instance1", "env1")):
        wait_until(f"step {step}", lambda step=step: step in run.steps(), process)
        if step:
            wait_until("requests that were moved or parked", lambda: bool(placed(run)), process)
        os.kill(pid_of(run, name), signal.SIGKILL)
    wait_until("step 3", lambda: 3 in run.steps(), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until("the workers' end", lambda: not workers_of(run.run_dir))
    num_steps = run.steps_enough()
    finish(run.start("--resume", f"orchestration.num_steps={num_steps}"))
    report = run.proven()
    assert report.figures.steps == num_steps and report.figures.groups_failed == 0
    assert placed(run)
    rows = run.lines("rollouts.jsonl")
    assert len({(row["group"], row["sample"]) for row in rows}) == len(rows) == num_steps * 16
    for row in rows:
        assert_turns_are_right(row)
    kept = {(row["group"], row["sample"]): row for row in rows}
    continued = [line for line in run.lines("continued.jsonl") if line["token_ids"]]
    assert continued, "something went on from its journal"
    for line in continued:
        row = kept.get((line["group"], line["sample"]))
        if row is not None:
            assert row["token_ids"][: len(line["token_ids"])] == line["token_ids"]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["sync", "one_step_off", "partial", "replication"])
def test_every_mode_trains_with_a_tool(tmp_path: Path, mode: str) -> None:
    """Instances that sleep while the learner works park the sessions that wait for an answer,
    `partial` re-versions them, `replication` ends those that are not needed."""
    run = tool_run(
        tmp_path,
        env__environments=calculator(latency_s=[0.05, 0.5]),
        orchestration__mode=mode,
        orchestration__num_steps=3,
    )
    run.train()
    assert run.proven().figures.groups_trained == 12
    rows = run.lines("rollouts.jsonl")
    assert len(rows) == 3 * 4 * 4
    assert max(assert_turns_are_right(row) for row in rows) > 1
    ends = Counter(
        action.end
        for entry in run.entries()
        for action in entry.actions
        if isinstance(action, EndGroup)
    )
    assert ends.keys() - {End.SURPLUS} == {End.TRAINED}
    assert (End.SURPLUS in ends) == (mode == "replication")
    summary = run.summary()
    assert summary["staleness_max"] <= {"one_step_off": 1, "partial": 2}.get(mode, 0)
    assert mode == "partial" or summary["mixed_version_frac"] == 0


def placed(run: TinyRun) -> list[Action]:
    return [a for entry in run.entries() for a in entry.actions if isinstance(a, (Move, Park))]
