"""A run with drafts is the run without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dora_rl.types import Mode
from dora_rl.workers import rollout
from tests.kit.inline_runs import config_of, proven, train

SAME = ("token_ids", "logprobs", "logprob_sum", "reward")


def run_of(run_dir: Path, mode: Mode, speculation: str) -> tuple[list[dict[str, Any]], bytes]:
    """Its trained samples and the weights that they made."""
    orchestration: dict[str, Any] = {"mode": mode, "freshness": "off"}
    if mode is Mode.MULTI_VERSION:
        orchestration["max_staleness"] = 0
    section = {"speculation": speculation, "num_instances": 1}
    config = config_of(run_dir, orchestration=orchestration, rollout=section)
    stop, _ = train(config)
    assert stop.done
    proven(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["accepted_tokens"] > 0) == (speculation == "on")
    assert summary["accepted_tokens"] <= summary["drafted_tokens"]
    lines = (run_dir / "rollouts.jsonl").read_text().splitlines()
    newest = max((run_dir / "weights").glob("*/*.safetensors"))
    return [json.loads(line) for line in lines], newest.read_bytes()


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_gives_the_same_samples(
    tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them where nobody is ahead of the learner; else those of the first version, for what
    later groups are generated on depends on who was quicker."""
    monkeypatch.setattr(rollout, "REPORT_BUSY_S", 0.0)  # every step is told
    (plain, before), (drafted, after) = (
        run_of(tmp_path / speculation, mode, speculation) for speculation in ("off", "on")
    )
    found = {(row["group"], row["sample"]): row for row in drafted}
    in_step = mode in (Mode.SYNC, Mode.MULTI_VERSION)
    compared = 0
    for row in plain:
        other = found.get((row["group"], row["sample"]))
        alike = other is not None and row["version"] == other["version"] == 0
        if in_step or (alike and row["segments"] == other["segments"] == 1):
            assert other is not None
            assert {name: row[name] for name in SAME} == {name: other[name] for name in SAME}
            compared += 1
    assert compared == len(plain) if in_step else compared >= 2
    if in_step:
        assert before == after
