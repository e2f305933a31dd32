"""One type of sample: what goes into a message or the store comes back as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from dora_rl.store.samples import Samples
from dora_rl.store.trajectories import (
    digest_of,
    routing_digest,
    routing_from_json,
    routing_to_json,
)
from dora_rl.types import ARRAYS, Branch, Finish, Group, RequestId, Segment, Trajectory
from dora_rl.workers.messages import Rows, pack, unpack

PLAIN = Trajectory(RequestId(7, 0), 2, [8, 9], [-0.1, -0.2], [1, 1])
# Every field has another value than its default.
FULL = Trajectory(
    RequestId(7, 1),
    3,
    token_ids=[8, 9, 10],
    logprobs=[-0.1, -0.2, -0.3],
    loss_mask=[1, 0, 1],
    finish=Finish.LENGTH,
    segments=(Segment(0, 2), Segment(2, 3)),
    prompt_ids=[5, 6],
    text="é",
    reward=-0.25,
    parts={"exact": -0.25},
    raw_logprobs=[-1.0, -2.0, -3.0],
    turns=2,
    error="why",
    branches=(Branch(0, 0, 0), Branch(2, 0, -1)),
    turn_rewards=(0.5, -0.75),
    expert_ids=np.arange(24, dtype=np.int16).reshape(3, 4, 2),
    teacher_logprobs=[-0.5, -0.5, -0.5],
)


def test_the_example_uses_every_field() -> None:
    """Or the tests below would not notice a field that is not carried."""
    for field in fields(Trajectory):
        value, default = getattr(FULL, field.name), getattr(PLAIN, field.name)
        assert not np.array_equal(value, default), field.name


def test_messages_carry_all_of_a_trajectory_but_its_prompt() -> None:
    message = unpack(pack(Rows((PLAIN, FULL))))
    assert isinstance(message, Rows)
    plain, full = message.samples
    assert plain == PLAIN
    assert full == replace(FULL, prompt_ids=[])
    assert full.expert_ids is not None and full.expert_ids.shape == (3, 4, 2)
    assert full.expert_ids.dtype == np.int16


def test_the_store_keeps_all_of_a_trajectory_but_its_prompt(tmp_path: Path) -> None:
    samples = Samples(tmp_path / "table.log")
    for sample in (FULL, PLAIN):
        samples.add(sample)
    samples.reward(PLAIN.request, 1.0, {"exact": 1.0})
    expected = [
        replace(PLAIN, reward=1.0, parts={"exact": 1.0}),
        replace(FULL, prompt_ids=[]),
    ]
    assert samples.trajectories(7) == expected
    samples.close()
    assert Samples(tmp_path / "table.log").trajectories(7) == expected


def test_a_sample_that_is_told_twice_is_kept_once_and_the_newer_one_counts(tmp_path: Path) -> None:
    samples = Samples(tmp_path / "table.log")
    samples.add(PLAIN)
    size = (tmp_path / "table.log").stat().st_size
    samples.add(PLAIN)
    assert (tmp_path / "table.log").stat().st_size == size
    samples.reward(PLAIN.request, 1.0)
    other = replace(PLAIN, logprobs=[-0.1, -0.25])
    samples.add(other)
    assert samples.get(PLAIN.request) == other, "the reward was that of the other response"


def test_values_are_arrays_and_equal_by_value() -> None:
    for name, dtype in ARRAYS.items():
        assert getattr(FULL, name).dtype == (dtype or "int16")
    assert replace(FULL) == FULL != PLAIN
    for name in ARRAYS:
        changed = np.array(getattr(FULL, name))
        changed.reshape(-1)[0] += 1
        assert replace(FULL, **{name: changed}) != FULL, name
    assert replace(FULL, teacher_logprobs=None) != FULL
    assert PLAIN.segments == (Segment(0, 2),) and not PLAIN.mixed and FULL.mixed
    assert (FULL.num_trained, FULL.truncated, PLAIN.truncated) == (2, True, False)
    with pytest.raises(TypeError, match="unhashable"):
        hash(FULL)


def test_the_digest_covers_the_routing_where_there_is_one() -> None:
    plain = "2885a9e4d3c846b2"
    assert digest_of(PLAIN) == plain, "samples of older releases have the digests they had"
    chosen = np.array([[[1, 2]], [[0, 3]], [[255, 255]], [[255, 255]]], np.uint8)
    routed = replace(PLAIN, expert_ids=chosen)
    shifted = replace(PLAIN, expert_ids=np.roll(chosen, 1, 0))
    wider = replace(PLAIN, expert_ids=chosen.astype(np.int16))
    assert len({plain, *map(digest_of, (routed, shifted, wider))}) == 4


def test_routing_in_json_has_its_digest_and_of_the_first_sample_all_of_it() -> None:
    chosen = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    first, second = (replace(sample, expert_ids=chosen) for sample in (PLAIN, FULL))
    digest, found = routing_from_json(json.loads(json.dumps(routing_to_json(first))))
    assert digest == routing_digest(chosen) and np.array_equal(found, chosen)  # type: ignore[arg-type]
    assert routing_from_json(routing_to_json(second)) == (digest, None)
    assert routing_from_json(routing_to_json(PLAIN)) == ("", None)
    digest, kind, shape, kept = routing_to_json(first)
    for damaged in (
        [digest, kind, shape, kept[:-4] + "AAAA"],
        [digest, kind, [2, 3, 2], kept],
        [digest, "|i1", shape, kept],
        [digest, kind, [3, 2], kept],
        [digest, kind, shape, "é"],
    ):
        with pytest.raises(ValueError):
            routing_from_json(damaged)


def test_routing_that_differs_is_another_sample_to_the_store(tmp_path: Path) -> None:
    samples = Samples(tmp_path / "table.log")
    first = replace(PLAIN, expert_ids=np.zeros((4, 1, 2), np.uint8))
    again = replace(PLAIN, expert_ids=np.ones((4, 1, 2), np.uint8))
    for sample in (first, again):
        samples.add(sample)
    assert samples.get(PLAIN.request) == again


def test_the_old_names_of_the_learners_samples_still_work() -> None:
    code = (
        "from dora_rl.trainer.batch import GroupBatch, Sample\n"
        "s = Sample(token_ids=(3,), logprobs=(-1.0,), loss_mask=(1,), reward=1.0, truncated=True)\n"
        "g = GroupBatch(group=4, version=1, prompt_ids=(1, 2), samples=(s,))\n"
        "print(type(g).__name__, g.id, g.samples[0].truncated)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [Group.__name__, "4", "True"]
    assert "FutureWarning: dora_rl.trainer.batch: GroupBatch and Sample are now" in done.stderr
