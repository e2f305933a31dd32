"""The tiny run on a Ray cluster that the command starts by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kit.tiny_runs import tiny_run

pytestmark = pytest.mark.cluster

FIXED = {
    "orchestration__max_staleness": 0,
    "orchestration__num_steps": 2,
    "trainer__canonical_order": True,
    "rollout__num_instances": 1,
}


def test_two_ranks_under_ray_give_the_run_of_one_rank_on_one_machine(tmp_path: Path) -> None:
    runs = [
        tiny_run(tmp_path / kind, runtime__world=kind, resources__learner_ranks=ranks, **FIXED)
        for kind, ranks in (("local", 1), ("ray", 2))
    ]
    for run in runs:
        run.train()
        assert run.proven().figures.groups_trained == 8
    one, two = (run.weights(2) for run in runs)
    start = runs[0].weights(1)
    moved = max(float(np.abs(one[name] - start[name]).max()) for name in one)
    apart = max(float(np.abs(one[name] - two[name]).max()) for name in one)
    assert moved > 1e-5 and apart < 1e-5
    rows = [
        {(row["group"], row["sample"]): row["token_ids"] for row in run.lines("rollouts.jsonl")}
        for run in runs
    ]
    assert rows[0] == rows[1], "the same tokens"
