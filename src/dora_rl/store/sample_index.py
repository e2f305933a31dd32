"""The sample table as the controller of a cluster has it: metadata; the payload is in the shards.

Has what `samples.Samples` has, row for row, except tokens, log-probs and text; where those are
needed it says which shard to ask. Rewards are kept here: they decide what happens next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dora_rl.controller.records import TrainedSample
from dora_rl.core import actions as act
from dora_rl.store.samples import Samples, known_reward
from dora_rl.store.storage_client import shard_of
from dora_rl.store.table import Row
from dora_rl.store.trajectories import trajectory_of
from dora_rl.types import GroupId, Prompt, RequestId, StepIndex, Trajectory, Version
from dora_rl.workers.messages import Fed, Stored, Trained, Where, ints


class SampleIndex(Samples):
    """The table without its payload. `addresses` are those of the shards; empty: it is away."""

    def __init__(self, path: Path, num_shards: int) -> None:
        super().__init__(path)
        self.addresses: list[str] = [""] * num_shards
        self.on_drop: Callable[[GroupId], None] = lambda group: None

    def where(self, group: GroupId, samples: Sequence[int]) -> Where:
        address = self.addresses[shard_of(group, len(self.addresses))]
        return Where(address, group, tuple(samples))

    def put_meta(self, said: Stored, version: Version) -> None:
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
            self.table.put([Row(event.request, version, columns)])
        if said.reward is not None:
            self.reward(event.request, said.reward)

    def where_to_read(self, request: RequestId) -> Where:
        return self.where(request.group, [request.sample])

    def _read(self, row: Row) -> Trajectory:
        """Without its payload; `turns` of a row here are the spans of its mask."""
        columns = {name: value for name, value in row.columns.items() if name != "turns"}
        return trajectory_of(row.request, row.version, columns)

    def feed(self, action: act.Feed, prompt_ids: Sequence[int]) -> Fed:
        chosen = self.chosen(action.group, action.samples)
        where = self.where(action.group, action.samples)
        rewards = tuple(sample.reward for sample in chosen)
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
        found: list[TrainedSample] = []
        for sample in super().trained(group, samples, prompt, tokens=False):
            columns = self.table.read(group, sample.sample)[0].columns
            found.append(
                replace(
                    sample,
                    num_tokens=columns["num_tokens"],
                    logprob_sum=columns["logprob_sum"],
                    turns=[(begin, end, mask) for begin, end, mask in columns["turns"]],
                    prompt="",
                )
            )
        return found

    def num_tokens(self, group: GroupId) -> int:
        return sum(row.columns["num_tokens"] for row in self.table.read(group))

    def drop(self, group: GroupId) -> None:
        super().drop(group)
        self.on_drop(group)
