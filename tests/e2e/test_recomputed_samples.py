"""A runtime that decodes under other weights than its log says is found out while it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dora_rl.cli import main
from dora_rl.core import events as ev
from dora_rl.observe.audit import Promise, audit_run
from dora_rl.types import RequestId
from dora_rl.workers.recheck import is_chosen
from tests.kit.places import ROOT
from tests.kit.tiny_runs import TinyRun, finish, tiny_run

# A deliberate bug of the instances: requests of a version that comes while an older one is still
# there are decoded with the older weights. Events, checksums and segments are as they should be.
MIXES_VERSIONS = """
import importlib.abc
import importlib.util
import sys


class Bug(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "dora_rl.engine.tensors.weights":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            load = module.Residency.load

            def load_for_all(residency, version, source, verify):
                yield from load(residency, version, source, verify)
                older = [slot for other, slot in residency.slots.items() if other < version]
                if older:
                    residency.slots[version] = older[-1]

            module.Residency.load = load_for_all

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Bug())
"""


def short_run(folder: Path, share: float = 1.0, **settings: object) -> TinyRun:
    """Long enough that later versions generate too."""
    more = {
        "orchestration__num_steps": 3,
        "orchestration__max_staleness": 1,
        "rollout__num_instances": 1,
    }
    return tiny_run(folder, audit__recompute_share=share, **(more | settings))


def recomputed(run: TinyRun) -> list[ev.Recomputed]:
    return [e.event for e in run.entries() if isinstance(e.event, ev.Recomputed)]


def num_trained(run: TinyRun) -> int:
    return sum(1 for _ in run.lines("rollouts.jsonl"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_honest_run_gives_the_same_again(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = short_run(tmp_path, rollout__dtype=dtype, trainer__compute_dtype=dtype)
    run.train()
    found = recomputed(run)
    assert len(found) == num_trained(run) and all(event.is_same for event in found)
    assert {event.version for event in found} >= {0, 1}
    assert main(["audit", "--files", str(run.run_dir)]) == 0
    assert f"computed again during the run: {len(found)} samples" in capsys.readouterr().out
    assert main(["audit", "--recompute", "9", str(run.run_dir)]) == 0
    said = capsys.readouterr().out
    assert "computed again now: 9 of " in said and "neighbouring version" in said
    if dtype == "float32":  # one step moves log-probs far beyond the tolerance
        noticed = int(said.split("power of this test: ")[1].split()[0])
        assert noticed >= 7


def test_an_instance_that_mixes_versions_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "bug").mkdir()
    (tmp_path / "bug" / "sitecustomize.py").write_text(MIXES_VERSIONS)
    paths = [str(tmp_path / "bug"), os.environ.get("PYTHONPATH", str(ROOT / "src"))]
    run = short_run(tmp_path)
    said = finish(run.start(PYTHONPATH=os.pathsep.join(paths)))
    assert "samples are not what their version gives" in said
    wrong = [event for event in recomputed(run) if not event.is_same]
    assert wrong and all(event.version > 0 for event in wrong)
    report = audit_run(run.run_dir / "events")
    assert not report.proved
    assert {finding.promise for finding in report.findings} == {Promise.C1}
    assert main(["audit", "--recompute", "100", str(run.run_dir)]) == 1


def test_the_share_is_kept_and_the_choice_always_the_same() -> None:
    requests = [RequestId(group, sample) for group in range(500) for sample in range(8)]
    for share in (0.0, 0.01, 0.3, 1.0):
        chosen = [is_chosen(0, request, share) for request in requests]
        assert abs(sum(chosen) / len(chosen) - share) < 0.02
        assert chosen == [is_chosen(0, request, share) for request in requests]
    assert [is_chosen(1, r, 0.5) for r in requests] != [is_chosen(0, r, 0.5) for r in requests]
