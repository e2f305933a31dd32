"""A run whose turns come from an agent over HTTP, through the real `openai` client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_rl.data.chains import digits, final_window, reward
from dora_rl.setup.tokenizer import open_tokenizer
from tests.kit.places import ROOT
from tests.kit.tiny_runs import TinyRun, tiny_run

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
