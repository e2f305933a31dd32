"""The samples of a local run: rows of the table from the end of generation to the end of a group.

The row is written before the event that tells of it is logged, so whatever the log says is ready
is there after a crash.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from dora_rl.controller.records import TrainedSample
from dora_rl.core import actions as act
from dora_rl.envs.base import spans
from dora_rl.store.table import Row, Table
from dora_rl.store.trajectories import columns_of, rounded, trajectory_of
from dora_rl.types import GroupId, Prompt, RequestId, Trajectory
from dora_rl.workers.messages import Fed, Where, ints

PAYLOAD = ("token_ids", "logprobs", "loss_mask")


class Samples:
    """The table as the controller uses it."""

    def __init__(self, path: Path) -> None:
        self.table = Table(path)

    def get(self, request: RequestId) -> Trajectory | None:
        """A sample, if it is here; in a cluster's index without its payload."""
        row = self.row(request)
        return self._read(row) if row is not None else None

    def groups(self) -> list[GroupId]:
        return self.table.groups()

    def trajectories(self, group: GroupId) -> list[Trajectory]:
        """All samples of a group that are here."""
        return [self._read(row) for row in self.table.read(group)]

    def where_to_read(self, request: RequestId) -> Where | None:
        """Where a reward worker finds text and tokens, if they are not here."""
        del request
        return None

    def keep_only(self, groups: Collection[GroupId]) -> None:
        """After a crash: drop groups that the log knows to have ended."""
        for group in self.table.groups():
            if group not in groups:
                self.table.drop(group)

    def put(self, sample: Trajectory) -> None:
        """A sample was generated. One that is there already was written just before a crash."""
        there = self.get(sample.request)
        # Where kernels are not exact its tokens or log-probs may be others than before the crash;
        # the new row counts, as its digest does in the log.
        if there is None or any(
            not np.array_equal(getattr(there, name), getattr(sample, name)) for name in PAYLOAD
        ):
            self.table.put([Row(sample.request, sample.version, columns_of(sample))])
        elif sample.reward is not None:  # its environment gave one
            self.reward(sample.request, sample.reward)

    def reward(
        self, request: RequestId, reward: float, parts: dict[str, float] | None = None
    ) -> None:
        """`parts`: what each reward function gave, by its label."""
        row = self.row(request)
        if row is not None and "reward" not in row.columns:
            self.table.extend({request: {"reward": reward, "parts": parts or {}}})

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
                turns=spans(sample.loss_mask.tolist()),
            )
            for sample in self.chosen(group, samples)
        ]

    def num_written(self, request: RequestId) -> int | None:
        """Tokens of a sample that the policy wrote; None: its payload is not here."""
        row = self.row(request)
        there = row is not None and "loss_mask" in row.columns
        return self._read(row).num_trained if row is not None and there else None

    def num_tokens(self, group: GroupId) -> int:
        return sum(len(sample.token_ids) for sample in self.trajectories(group))

    def drop(self, group: GroupId) -> None:
        self.table.drop(group)

    def sync(self) -> None:
        """The loss of the host takes nothing of what is there now."""
        self.table.sync()

    def close(self) -> None:
        self.table.close()

    def row(self, request: RequestId) -> Row | None:
        found = self.table.read(request.group, request.sample)
        return found[0] if found else None

    def _read(self, row: Row) -> Trajectory:
        return trajectory_of(row.request, row.version, row.columns)

    def chosen(self, group: GroupId, samples: Sequence[int]) -> list[Trajectory]:
        found = {sample.request.sample: sample for sample in self.trajectories(group)}
        return [found[sample] for sample in samples]


def known_reward(sample: Trajectory) -> float:
    assert sample.reward is not None, "only scored samples are trained"
    return sample.reward
