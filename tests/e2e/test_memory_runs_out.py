"""A real run in which memory runs out in every kind of worker: told once each, and nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.core.events import InstanceLost, LearnerLost, LoadFailed, SampleFailed
from dora_rl.out_of_memory import VARIABLE
from tests.kit.tiny_runs import finish, tiny_run

pytestmark = pytest.mark.full

FAULTS = {
    "learner: out of memory in a pack of": "learner:pack:2",
    "learner: out of memory while samples were computed again": "learner:twin:1",
    "out of memory in a step of": "instance:launch:12",
    "out of memory while version": "instance:load:2",
    "evaluator: out of memory in a step of": "evaluator:launch:4",
    "evaluator: out of memory while version 0 was loaded": "evaluator:load:1",
}


def test_no_sample_is_lost_and_every_shortage_is_told(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path,
        rollout__num_instances=1,
        orchestration__max_staleness=1,
        audit__recompute_share=1.0,
        data__eval=[{"path": "dora_rl.data.tasks:Chains", "options": {"num_steps_max": 4}}],
        evaluation__num_prompts=8,
        evaluation__every_steps=2,
        logging__progress=True,
    )
    said = finish(run.start(**{VARIABLE: " ".join(FAULTS.values())}), 0)
    for words in FAULTS:
        assert said.count(words) == (2 if words.startswith("out of") else 1), (words, said)
    run.proven()
    events = [entry.event for entry in run.entries()]
    ends = (InstanceLost, LoadFailed, SampleFailed, LearnerLost)
    assert not [event for event in events if isinstance(event, ends)]
    assert run.steps() == [0, 1, 2]
    evaluated = [line for line in run.lines("metrics.jsonl") if "eval/greedy" in line]
    assert [line["version"] for line in evaluated] == [0, 2, 3]
    assert all(not line.get("eval/failed") for line in evaluated)
    retries = [line.get("memory/retries", 0) for line in run.lines("metrics.jsonl")]
    assert sum(retries) == 1
