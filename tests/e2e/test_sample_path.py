"""docs/life_of_a_sample.md names the files that a sample passes: compared with a traced run.

A file is passed where one of its functions is handed, or gives back, the sample in one of its
shapes or numbers of it, between the issue of the first group and the moment when the next version
is loaded, in any process. What runs beside it (heartbeats, watchdog, locks) is not on its way.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import dora_rl
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from tests.kit.places import ROOT
from tests.kit.tiny_runs import finish, tiny_run

PAGE = ROOT / "docs" / "life_of_a_sample.md"
TRACER = Path(__file__).parent / "traced"
PACKAGE = Path(dora_rl.__file__).parent
# So many files the page names today, guesses of next tokens among them; it is not to become more.
FILES_MAX = 70
# What the page begins with: before there is a sample there is a configuration.
FRONT = {"cli.py", "commands/train.py", "config/__init__.py", "setup/prepare.py"}
# What a sample is on its way, and what becomes of it. Any array or tensor counts as well.
SHAPES = {
    f"dora_rl.{name}"
    for name in [
        "types.Prompt",
        "types.RequestId",
        "types.Trajectory",
        "types.Group",
        "core.actions.IssueGroup",
        "core.actions.Dispatch",
        "core.actions.Score",
        "core.actions.Feed",
        "core.actions.CloseStep",
        "core.actions.EndGroup",
        "core.actions.Load",
        "core.events.SampleFinished",
        "core.events.Scored",
        "core.events.StepCommitted",
        "core.events.Loaded",
        "core.state.Group",
        "core.state.Request",
        "engine.sequence.Request",
        "engine.sequence.Sequence",
        "engine.sequence.Output",
        "engine.plan.Span",
        "engine.plan.Plan",
        "engine.plan.StepResult",
        "engine.tensors.sampler.Drawn",
        "workers.messages.Finished",
        "workers.messages.Fed",
        "store.table.Row",
        "controller.scoring.Job",
        "controller.records.TrainedSample",
        "rewards.base.ScoreItem",
        "trainer.documents.Document",
        "trainer.documents.Pack",
        "trainer.losses.functions.GroupScores",
        "trainer.losses.inputs.LossInputs",
        "trainer.losses.inputs.LossOutput",
        "trainer.policy.logprobs.TokenScores",
        "weights.format.SealedFile",
        "model.sealed.CheckedSource",
    ]
}


def named_on_the_page() -> set[str]:
    links = re.findall(r"\]\(\.\./src/dora_rl/([\w/]+\.py)\)", PAGE.read_text())
    return set(links)


def test_a_sample_passes_the_files_that_its_page_names(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path,
        orchestration__num_steps=2,
        rollout__num_instances=1,
        checkpoint__every_steps=100,
    )
    out = tmp_path / "trace"
    out.mkdir()
    path = os.pathsep.join([str(TRACER), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    finish(run.start(PYTHONPATH=path, DORA_RL_TRACE_TO=str(out), DORA_RL_TRACED=str(PACKAGE)))
    entries = run.entries()
    begin = next(e.now for e in entries if any(isinstance(a, act.IssueGroup) for a in e.actions))
    end = next(e.now for e in entries if isinstance(e.event, ev.Loaded) and e.event.version == 1)
    ran: set[str] = set()
    passed: set[str] = set()
    for trace in out.iterdir():
        for line in trace.read_text().splitlines():
            seconds, file, _, kind = line.split("\t")
            ran.add(file)
            array = kind.partition(".")[0] in ("numpy", "torch")
            if begin <= float(seconds) <= end and (array or kind in SHAPES):
                passed.add(file)
    named = named_on_the_page()
    assert len(passed) > 40, "the tracer saw next to nothing"
    assert not passed - named, f"passed, and not on the page: {sorted(passed - named)}"
    assert not named - ran, f"on the page, and never run: {sorted(named - ran)}"


def test_the_way_of_a_sample_does_not_grow() -> None:
    named = named_on_the_page()
    assert named >= FRONT and all((PACKAGE / file).is_file() for file in named)
    assert len(named) <= FILES_MAX, "simplify the way instead"


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_shape_is_a_type_of_ours(shape: str) -> None:
    """Or the tracer would wait for a name that has changed."""
    module, _, name = shape.rpartition(".")
    assert hasattr(__import__(module, fromlist=[name]), name)
