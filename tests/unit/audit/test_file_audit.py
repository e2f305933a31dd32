"""Files of a run against its log, where a small run would not show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.audit.files import FileAudit
from dora_rl.config import RunConfig
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.histories import ROOT
from dora_rl.observe.audit import Auditor
from dora_rl.observe.audit_books import GroupRecord
from dora_rl.observe.audit_books import Sample as Known
from dora_rl.observe.eventlog import Entry
from dora_rl.setup.settings import core_params
from dora_rl.store.samples import Samples
from dora_rl.store.trajectories import rounded, sample_digest
from dora_rl.types import Branch, Finish, RequestId, Segment, Trajectory
from dora_rl.weights.store import DiskWeightStore

MODEL = Path(__file__).parents[3] / "recipes" / "models" / "tiny"
RID, SEGMENTS = RequestId(7, 1), (Segment(0, 2),)


def payload(**changes: Any) -> dict[str, Any]:
    arrays = {
        "token_ids": np.array([5, 6, 7], dtype=np.int32),
        "logprobs": np.array([-0.12345, -1.5, -2e-9], dtype=np.float32),
        "loss_mask": np.array([1, 0, 1], dtype=np.uint8),
    }
    return arrays | changes


def finished(arrays: dict[str, Any]) -> ev.SampleFinished:
    digest = sample_digest(RID, SEGMENTS, *payload().values())
    num = len(arrays["token_ids"])
    return ev.SampleFinished(RID, 0, "a", num, Finish.STOP, SEGMENTS, digest=digest)


def put(path: Path, arrays: dict[str, Any], reward: float | None = None) -> None:
    samples = Samples(path)
    samples.add(Trajectory(RID, 2, **arrays, segments=SEGMENTS, text="text"))
    if reward is not None:
        samples.reward(RID, reward)
    samples.close()


def auditor(reward: float | None = None) -> Auditor:
    """One that has read that the second sample of group 7 finished."""
    found = Auditor(keep=True)
    known = Known(asked=0, reward=reward, digest=finished(payload()).digest)
    found.books.live[7] = GroupRecord(2, 7, [Known(), known])
    found.books.params = replace(found.books.params, group_size=2)
    return found


def table_findings(run: Path, reward: float | None = None) -> list[str]:
    return [
        str(finding)
        for finding in FileAudit(run, auditor(reward)).check()
        if "table" in finding.subject
    ]


def test_an_honest_row_passes(tmp_path: Path) -> None:
    put(tmp_path / "table.log", payload(), reward=0.5)
    before = (tmp_path / "table.log").read_bytes()
    assert table_findings(tmp_path, 0.5) == []
    assert (tmp_path / "table.log").read_bytes() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": np.array([5, 6, 8], dtype=np.int32)},
        {"logprobs": np.array([-0.12345, -1.6, 0], dtype=np.float32)},
        {"loss_mask": np.array([1, 1, 1], dtype=np.uint8)},
        {"branches": (ROOT, Branch(1, 0, 0))},
        {"turn_rewards": (0.5, 0.5)},
        {"expert_ids": np.zeros((5, 1, 2), dtype=np.uint8)},
    ],
)
def test_a_row_with_another_payload_is_named(changes: dict[str, Any], tmp_path: Path) -> None:
    put(tmp_path / "table.log", payload(**changes))
    (found,) = table_findings(tmp_path)
    assert "sample 1 of group 7 is not what was generated" in found


def test_another_reward_and_a_missing_row_are_named(tmp_path: Path) -> None:
    put(tmp_path / "table.log", payload(), reward=0.5)
    assert "its reward is 0.5, not 1.0" in table_findings(tmp_path, 1.0)[0]
    (tmp_path / "table.log").unlink()
    found = table_findings(tmp_path)
    assert any("finished and has no row" in text for text in found)


def test_a_row_written_before_a_crash_gives_way_to_the_one_that_is_logged(tmp_path: Path) -> None:
    """The tokens may be the same and the log-probs others, where kernels are not exact."""
    first = payload(logprobs=np.array([-0.2, -1.5, 0], dtype=np.float32))
    put(tmp_path / "table.log", first)
    put(tmp_path / "table.log", payload())
    assert table_findings(tmp_path) == []


def test_what_rollouts_hold_has_the_same_digest() -> None:
    """They have log-probs to four decimals, as text."""
    logprobs = np.concatenate(
        [-np.logspace(-12, 2, 4000), [0.0, -0.00005, -0.00015, -1.00005]]
    ).astype(np.float32)
    ids, mask = np.arange(len(logprobs)), np.ones(len(logprobs))
    exact = sample_digest(RID, SEGMENTS, ids, logprobs, mask)
    again = sample_digest(RID, SEGMENTS, ids.tolist(), rounded(logprobs), mask.tolist())
    assert exact == again
    assert exact != sample_digest(RequestId(7, 0), SEGMENTS, ids, logprobs, mask)
    assert exact != sample_digest(RID, (Segment(0, 3),), ids, logprobs, mask)
    turn_by_turn = sample_digest(RID, SEGMENTS, ids, logprobs, mask, (), (0.5, 1))
    assert exact != turn_by_turn
    assert turn_by_turn == sample_digest(RID, SEGMENTS, ids, logprobs, mask, [], [0.5, 1.0])


def test_a_flipped_bit_in_the_moments_is_named(tmp_path: Path) -> None:
    store = DiskWeightStore(tmp_path / "learner" / "moments")
    store.publish(3, [("exp_avg", torch.ones(8))])

    def found() -> list[str]:
        subjects = [finding.subject for finding in FileAudit(tmp_path, auditor()).check()]
        return [subject for subject in subjects if "moments" in subject]

    assert found() == []
    (path,) = tmp_path.rglob("model.safetensors")
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert found() == ["moments of version 3"]


@pytest.mark.parametrize("num_killed", [0, 1])
def test_counts_are_compared_where_no_life_was_killed(num_killed: int, tmp_path: Path) -> None:
    """One that is killed leaves the counts of its last step."""
    found = auditor()
    found.stop, found.num_killed = act.Stop("done", True), num_killed
    (tmp_path / "summary.json").write_text(json.dumps({"migrations": 5, "stopped": "done"}))
    files = FileAudit(tmp_path, found)
    said = [f.message for f in files.check() if f.subject == "summary.json"]
    assert ("migrations is 5, the log gives 0" in said) == (not num_killed)
    assert any("migrations: a life was killed" in note for note in files.notes) == bool(num_killed)


@pytest.mark.parametrize("is_older", [True, False])
def test_a_release_that_counted_otherwise_is_not_accused(is_older: bool, tmp_path: Path) -> None:
    """Its groups waited for all samples, and its sum of trained tokens had the prompts in it."""
    found = auditor()
    found.stop, found.books.config = act.Stop("done", True), ""
    found.chain.num_chained = int(not is_older)
    config = RunConfig.model_validate({"model": {"path": str(MODEL)}})
    found.books.params = replace(core_params(config), samples_min=0)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    line = {"step": 0, "num_samples": 2, "time/step": 1.0, "staleness/mean": 0.0}
    line |= {"staleness/max": 0, "mixed_version_frac": 0.0, "reward/mean": 0.5}
    line |= {"response_length/mean": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    summary = {"tokens_trained": 26, "stopped": "done"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    said = [f.message for f in FileAudit(tmp_path, found).check()]
    assert ("tokens_trained is 26, the log gives 6" in said) != is_older
    assert any("samples_min" in one for one in said) != is_older


def test_a_life_that_another_follows_without_a_stop_was_killed() -> None:
    found, params = Auditor(), Params()
    events = [ev.Started(params), ev.Resumed(params), ev.Tick(), ev.Resumed(params)]
    for number, event in enumerate(events):
        entry = Entry(number, float(number), event, [])
        if isinstance(event, ev.Tick):
            entry.actions.append(act.Stop("interrupted", False))
        found.see(entry)
    assert (found.num_killed, found.books.figures.num_resumes) == (1, 2)


def test_the_mean_staleness_is_that_of_trained_samples() -> None:
    """As console and summary have it: a group that lost samples counts for fewer."""
    found = auditor()
    books = found.books
    for group, version, fed in ((8, 0, (0,)), (9, 1, (0, 1))):
        books.live[group] = GroupRecord(version, group, [Known(), Known()], step=1, fed=fed)
        books.expected[group] = 1
        books.unended[version] = 1
        found.groups.on_end(act.EndGroup(group, version, act.End.TRAINED, 1, ""))
    assert found.report().figures.staleness_mean == pytest.approx(1 / 3)
