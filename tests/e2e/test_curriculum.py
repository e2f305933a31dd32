"""A real run with a curriculum: stopped, resumed, audited, replayed, and what it draws less of."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dora_rl.core import actions as act
from dora_rl.observe.eventlog import Entry, read
from tests.kit.tiny_runs import tiny_run

CHAINS = "dora_rl.data.tasks:Chains"
HARD = {"path": CHAINS, "name": "six", "options": {"num_digits": 6, "num_steps_max": 3}}
EASY = {"path": CHAINS, "name": "three", "options": {"num_steps_max": 3}}


@pytest.mark.full
def test_a_run_with_a_curriculum_is_resumed_audited_and_replayed(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path,
        data__train=[EASY, HARD],
        data__curriculum="pools",
        data__curriculum_pools=1,
        rollout__tokens_max=48,
        orchestration__filter_equal=True,
        orchestration__num_steps=5,
    )
    run.train()
    run.train("--resume", "orchestration.num_steps=8")
    assert run.proven().figures.groups_trained == 8 * 4
    issued = Counter(
        action.prompt % 2
        for entry in read(run.run_dir / "events")
        if isinstance(entry, Entry)
        for action in entry.actions
        if isinstance(action, act.IssueGroup)
    )
    assert issued[1] < issued[0] / 2, "chains of six digits are never right"
    refused = run.start("--resume", "orchestration.num_steps=9", "data.curriculum=off")
    _, said = refused.communicate(timeout=120)
    assert refused.returncode != 0 and "data.curriculum was 'pools' and cannot become" in said


def test_rows_are_counted_when_the_data_are_open(tmp_path: Path) -> None:
    """The core is told how many there are, and `check` says so."""
    rows = [{"prompt": f"0{n}:123\n", "answer": "1"} for n in range(1, 10)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tiny_run(tmp_path, data__train=[str(data)], data__curriculum="rows")
    from dora_rl.setup.prepare import prepare
    from dora_rl.setup.settings import core_params, load_config

    prepared = prepare(load_config(run.config))
    params = core_params(prepared.config)
    assert (params.pools, params.pool_recent, prepared.train.num_pools) == (9, 2, 9)
    assert any("9 pools" in line for line in prepared.describe())
