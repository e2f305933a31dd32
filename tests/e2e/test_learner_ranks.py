"""Two learner ranks (FSDP2 over gloo) in the local runtime give the run that one rank gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kit.tiny_runs import tiny_run

# No staleness and a canonical order: which groups a step trains, and in what order, is fixed.
FIXED = {
    "orchestration__max_staleness": 0,
    "orchestration__num_steps": 2,
    "trainer__canonical_order": True,
    "rollout__num_instances": 1,
}


@pytest.mark.full
def test_two_ranks_give_the_run_of_one(tmp_path: Path) -> None:
    runs = [
        tiny_run(tmp_path / str(ranks), resources__learner_ranks=ranks, **FIXED) for ranks in (1, 2)
    ]
    for run in runs:
        run.train()
        assert run.proven().figures.groups_trained == 8
    one, two = (run.weights(2) for run in runs)
    assert one.keys() == two.keys()
    start = runs[0].weights(1)
    moved = max(float(np.abs(one[name] - start[name]).max()) for name in one)
    apart = max(float(np.abs(one[name] - two[name]).max()) for name in one)
    assert moved > 1e-5 and apart < 1e-5
    metrics = [run.lines("metrics.jsonl") for run in runs]
    for name in ("reward/mean", "loss", "grad_norm", "train/tokens"):
        values = [[line[name] for line in lines] for lines in metrics]
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5, err_msg=name)
