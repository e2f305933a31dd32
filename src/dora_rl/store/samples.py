"""The samples of a run as its controller has them, from the end of generation to the group's end.

The row is written before the event that tells of it is logged, so whatever the log says is ready
is there after a crash. On one machine a row has the whole sample (`Samples`). On a cluster the
payload is in the shards (`storage`) and the controller has the rest (`SampleIndex`): row for row
the same, without tokens, log-probs and text. Rewards are here in both: they decide what is next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dora_rl.controller.records import TrainedSample
from dora_rl.core import actions as act
from dora_rl.envs.base import spans
from dora_rl.store.table import Row, Table
from dora_rl.store.trajectories import columns_of, rounded, routing_to_json, trajectory_of
from dora_rl.types import GroupId, Prompt, RequestId, StepIndex, Trajectory, Version
from dora_rl.workers.messages import Fed, Stored, Trained, Where, ints

PAYLOAD = ("token_ids", "logprobs", "loss_mask", "expert_ids")


class Samples(Table):
    """A table whose rows are trajectories."""

    def get(self, request: RequestId) -> Trajectory | None:
        """A sample, if it is here; in a cluster's index without its payload."""
        row = self.row(request)
        return self.trajectory(row) if row is not None else None

    def trajectories(self, group: GroupId) -> list[Trajectory]:
        """All samples of a group that are here."""
        return [self.trajectory(row) for row in self.read(group)]

    def trajectory(self, row: Row) -> Trajectory:
        return trajectory_of(row.request, row.version, row.columns)

    def chosen(self, group: GroupId, samples: Sequence[int]) -> list[Trajectory]:
        found = {sample.request.sample: sample for sample in self.trajectories(group)}
        return [found[sample] for sample in samples]

    def where_to_read(self, request: RequestId) -> Where | None:
        """Where a reward worker finds text and tokens, if they are not here."""
        return None

    def keep_only(self, groups: Collection[GroupId]) -> None:
        """After a crash: drop groups that the log knows to have ended."""
        for group in self.groups():
            if group not in groups:
                self.drop(group)

    def add(self, sample: Trajectory) -> None:
        """A sample was generated. One that is there already was written just before a crash."""
        there = self.get(sample.request)
        # Where kernels are not exact its tokens or log-probs may be others than before the crash;
        # the new row counts, as its digest does in the log.
        if there is None or any(
            not np.array_equal(getattr(there, name), getattr(sample, name)) for name in PAYLOAD
        ):
            self.put([Row(sample.request, sample.version, columns_of(sample))])
        elif sample.reward is not None:  # its environment gave one
            self.reward(sample.request, sample.reward)

    def reward(
        self,
        request: RequestId,
        reward: float,
        parts: dict[str, float] | None = None,
        teacher_logprobs: Sequence[float] = (),
    ) -> None:
        """`parts`: what each reward function gave, by its label. What the row has stays."""
        row, given = self.row(request), dict[str, Any]()
        if row is None:
            return
        if "reward" not in row.columns:
            given = {"reward": reward, "parts": parts or {}}
        if teacher_logprobs and "teacher_logprobs" not in row.columns:
            given["teacher_logprobs"] = np.array(teacher_logprobs, np.float32)
        if given:
            self.extend(request, given)

    def feed(self, action: act.Feed, prompt_ids: Sequence[int]) -> Fed:
        """The message that gives a group to the learner; sizes of its batch are filled in later."""
        chosen = tuple(self.chosen(action.group, action.samples))
        return Fed(action, 0, 0, ints(prompt_ids), chosen)

    def trained(
        self, group: GroupId, samples: tuple[int, ...], prompt: Prompt, *, tokens: bool = True
    ) -> list[TrainedSample]:
        """Without `tokens` only what the figures of a step are made of."""
        return [
            TrainedSample(
                group=group,
                sample=sample.request.sample,
                version=sample.version,
                num_prompt=len(prompt.token_ids),
                num_tokens=len(sample.token_ids),
                reward=known_reward(sample),
                finish=sample.finish.value,
                text=sample.text,
                prompt=prompt.text,
                segments=len(sample.segments),
                logprobs=rounded(sample.logprobs) if tokens else [],
                logprob_sum=float(sample.logprobs.sum(dtype=np.float64)),
                token_ids=sample.token_ids.tolist() if tokens else [],
                parts=sample.parts,
                env=prompt.env,
                turns=spans_of(sample),
                branches=list(sample.branches),
                turn_rewards=list(sample.turn_rewards),
                experts=routing_to_json(sample) if tokens else [],
            )
            for sample in self.chosen(group, samples)
        ]

    def num_written(self, request: RequestId) -> int | None:
        """Tokens of a sample that the policy wrote; None: its payload is not here."""
        row = self.row(request)
        if row is None or "loss_mask" not in row.columns:
            return None
        return self.trajectory(row).num_trained

    def num_tokens(self, group: GroupId) -> int:
        return sum(len(sample.token_ids) for sample in self.trajectories(group))


def spans_of(sample: Trajectory) -> list[tuple[int, int, int]]:
    """Its turns and what was given between them; a branch begins a new one."""
    return spans(sample.loss_mask.tolist(), [branch.start for branch in sample.branches])


def known_reward(sample: Trajectory) -> float:
    assert sample.reward is not None, "only scored samples are trained"
    return sample.reward


def shard_of(group: GroupId, num_shards: int) -> int:
    return group % num_shards


class SampleIndex(Samples):
    """The samples without their payload. `addresses` are those of the shards; empty: it is away."""

    def __init__(self, path: Path, num_shards: int) -> None:
        super().__init__(path)
        self.addresses: list[str] = [""] * num_shards
        self.on_drop: Callable[[GroupId], None] = lambda group: None

    def where(self, group: GroupId, samples: Sequence[int]) -> Where:
        address = self.addresses[shard_of(group, len(self.addresses))]
        return Where(address, group, tuple(samples))

    def where_to_read(self, request: RequestId) -> Where:
        return self.where(request.group, [request.sample])

    def add_stored(self, said: Stored, version: Version) -> None:
        """A shard has the row of a finished sample."""
        event = said.event
        columns = {
            "num_tokens": event.num_tokens,
            "logprob_sum": said.logprob_sum,
            "turns": [list(turn) for turn in said.turns],
            "finish": event.finish.value,
            "segments": [list(segment) for segment in event.segments],
        }
        there = self.row(event.request)
        if there is None or any(there.columns[name] != columns[name] for name in columns):
            self.put([Row(event.request, version, columns)])
        if said.reward is not None:
            self.reward(event.request, said.reward)

    def trajectory(self, row: Row) -> Trajectory:
        """Without its payload; `turns` of a row here are the spans of its mask."""
        columns = {name: value for name, value in row.columns.items() if name != "turns"}
        return trajectory_of(row.request, row.version, columns)

    def feed(self, action: act.Feed, prompt_ids: Sequence[int]) -> Fed:
        where = self.where(action.group, action.samples)
        rewards = tuple(sample.reward for sample in self.chosen(action.group, action.samples))
        return Fed(action, 0, 0, ints(prompt_ids), where=where, rewards=rewards)

    def lines_due(
        self,
        step: StepIndex,
        group: GroupId,
        version: Version,
        samples: tuple[int, ...],
        prompt: Prompt,
    ) -> Trained:
        """What the shard needs to write the group's lines of rollouts.jsonl."""
        chosen = self.chosen(group, samples)
        return Trained(
            step,
            group,
            version,
            samples,
            rewards=tuple(known_reward(sample) for sample in chosen),
            parts=tuple(sample.parts for sample in chosen),
            prompt=(prompt.index, prompt.token_ids, prompt.text, prompt.env),
        )

    def trained(
        self, group: GroupId, samples: tuple[int, ...], prompt: Prompt, *, tokens: bool = False
    ) -> list[TrainedSample]:
        """For the figures of a step; tokens and text are written by the shards."""
        assert not tokens, "the shards have them"
        rows = {row.request.sample: row.columns for row in self.read(group)}
        return [
            replace(
                sample,
                num_tokens=rows[sample.sample]["num_tokens"],
                logprob_sum=rows[sample.sample]["logprob_sum"],
                turns=[tuple(turn) for turn in rows[sample.sample]["turns"]],
                prompt="",
            )
            for sample in super().trained(group, samples, prompt, tokens=False)
        ]

    def num_tokens(self, group: GroupId) -> int:
        return sum(row.columns["num_tokens"] for row in self.read(group))

    def drop(self, group: GroupId) -> None:
        super().drop(group)
        self.on_drop(group)
