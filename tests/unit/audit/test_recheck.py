"""Which version a sample is computed again under: the one its own segment names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dora_rl.audit.recompute import Recomputation, reachable
from dora_rl.config import AuditConfig, ModelConfig, RunConfig
from dora_rl.core import events as ev
from dora_rl.observe.audit import Auditor
from dora_rl.observe.audit_books import GroupRecord, TrainedSample
from dora_rl.observe.audit_books import Sample as Known
from dora_rl.types import Group, Mode, RequestId, Segment, Trajectory
from dora_rl.weights.store import VersionMissing
from dora_rl.workers.recheck import Recheck

# A request of a group of version 1 that was parked before its first token and went on under 2.
LATER = (Segment(0, 2),)


class NoStore:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def map(self, version: int) -> Any:
        self.asked.append(version)
        raise VersionMissing(f"version {version}")


def test_a_sample_is_taken_under_the_version_of_its_segment() -> None:
    store: Any = NoStore()
    scorer = SimpleNamespace(make_twin=None, make_adapted=None)
    policy = SimpleNamespace(compute_dtype=torch.float32)
    learner: Any = SimpleNamespace(num_ranks=1, scorer=scorer, policy=policy, pack_tokens=64)
    config = RunConfig(model=ModelConfig(path="."), audit=AuditConfig(recompute_share=1.0))
    recheck = Recheck(learner, store, config, "cpu", lambda event: None)
    sample = Trajectory(RequestId(7, 0), 1, [5, 6], [-0.1, -0.2], [1, 1], segments=LATER)
    mixed = replace(sample, segments=(Segment(0, 1), Segment(1, 2)))
    recheck.offer(Group(7, 1, [3], (sample, replace(mixed, request=RequestId(7, 1)))))
    assert store.asked == [2]


def test_a_stored_sample_is_taken_under_the_version_that_the_log_names(tmp_path: Path) -> None:
    line = {
        "group": 7,
        "sample": 0,
        "version": 1,
        "segments": 1,
        "token_ids": [5],
        "logprobs": [-0.1],
        "turns": [[0, 1, 1]],
        "reward": 1.0,
    }
    path, trained = (
        tmp_path / "rollouts.jsonl",
        {RequestId(7, 0): TrainedSample(2, 1, 7, 1, 1.0, "", LATER, "stop")},
    )
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"group": 8}) + "\n[1,2]\n{")
    outcome = Recomputation()
    (one,) = reachable(path, {1, 2}, trained, outcome)
    assert one.version == 2 and reachable(path, {1}, trained, Recomputation()) == []
    assert [f.subject.split()[-1] for f in outcome.findings] == ["2", "3", "4"]


@pytest.mark.parametrize(("version", "num"), [(2, 0), (1, 1)])
def test_the_audit_expects_the_version_of_the_segment(version: int, num: int) -> None:
    auditor = Auditor()
    auditor.books.params = replace(auditor.books.params, mode=Mode.PARTIAL)
    auditor.books.live[7] = GroupRecord(1, 7, [Known(asked=0, segments=LATER)])
    event = ev.Recomputed(RequestId(7, 0), version, 2, 0.0, 0.0, 1e-4)
    auditor.groups.on_recomputed(event)
    assert auditor.findings.num == num


def one_sample(group: int) -> Group:
    ids, logprobs = [5, 6], [-0.1, -0.2]
    sample = Trajectory(RequestId(group, 0), 2, ids, logprobs, [1, 1], reward=1.0)
    return Group(group, 2, [3], (sample,))


def waiting_recheck(make_twin: Any, notes: list[str]) -> tuple[Recheck, Any]:
    """One sample waits; the learner holds no gradients yet."""
    sealed = SimpleNamespace(version=2, base="", names=lambda: ["model.norm.weight"])
    store: Any = SimpleNamespace(map=lambda version: sealed)
    scorer = SimpleNamespace(make_twin=make_twin, make_adapted=make_twin)
    policy = SimpleNamespace(compute_dtype=torch.float32)
    learner: Any = SimpleNamespace(
        num_ranks=1, scorer=scorer, policy=policy, pack_tokens=64, holds_gradients=False
    )
    config = RunConfig(model=ModelConfig(path="."), audit=AuditConfig(recompute_share=1.0))
    recheck = Recheck(learner, store, config, "cpu", lambda event: None, notes.append)
    recheck.offer(one_sample(7))
    return recheck, learner


def test_no_memory_for_a_twin_ends_the_recheck_and_not_the_run() -> None:
    def no_room() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.10 GiB.")

    notes: list[str] = []
    recheck, _ = waiting_recheck(no_room, notes)
    assert recheck.is_waiting
    recheck.finish()
    assert len(notes) == 1 and "3.10 GiB" in notes[0] and "audit.recompute_share" in notes[0]
    recheck.offer(one_sample(8))
    assert not recheck.is_waiting and len(notes) == 1


def test_other_faults_of_a_twin_are_not_hidden() -> None:
    def broken() -> Any:
        raise RuntimeError("shapes differ")

    recheck, _ = waiting_recheck(broken, [])
    with pytest.raises(RuntimeError, match="shapes differ"):
        recheck.finish()


def test_a_twin_is_made_while_no_gradients_are_held() -> None:
    """The memory plan counts one of the two."""
    recheck, learner = waiting_recheck(None, [])
    learner.holds_gradients = True
    assert not recheck.is_waiting
    recheck.catch_up()  # not for so few
    learner.holds_gradients = False
    assert recheck.is_waiting
