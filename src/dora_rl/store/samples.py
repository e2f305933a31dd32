"""The samples of a run: rows of the table from the end of generation to the end of a group.

The row is written before the event that tells of it is logged, so whatever the log says is ready
is there after a crash.

`SampleIndex` is the table as the controller of a cluster has it. It has what `Samples` has, row for
row, except tokens, log-probs and text, which are in the shards; where those are needed it says
which shard to ask. Rewards are kept here: they decide what happens next.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.controller.records import TrainedSample
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.envs.base import spans
from dora_rl.store.storage_client import shard_of
from dora_rl.store.table import Row, Table
from dora_rl.store.trajectories import columns_of, rounded, to_message, trajectory_of
from dora_rl.types import GroupId, Prompt, RequestId, StepIndex, Trajectory, Version
from dora_rl.workers.crew import Crew

PAYLOAD = ("token_ids", "logprobs", "loss_mask")


class Samples:
    """The table as the controller uses it."""

    def __init__(self, path: Path) -> None:
        self._table = Table(path)

    def get(self, request: RequestId) -> Trajectory | None:
        """A sample, if it is here; in a cluster's index without its payload."""
        row = self._row(request)
        return self._read(row) if row is not None else None

    def groups(self) -> list[GroupId]:
        return self._table.groups()

    def trajectories(self, group: GroupId) -> list[Trajectory]:
        """All samples of a group that are here."""
        return [self._read(row) for row in self._table.read(group)]

    def where_to_read(self, request: RequestId) -> dict[str, Any]:
        """What tells a reward worker where text and tokens are, if they are not here."""
        return {}

    def keep_only(self, groups: Collection[GroupId]) -> None:
        """After a crash: drop groups that the log knows to have ended."""
        for group in self._table.groups():
            if group not in groups:
                self._table.drop(group)

    def put(self, sample: Trajectory) -> None:
        """A sample was generated. One that is there already was written just before a crash."""
        there = self.get(sample.request)
        # Where kernels are not exact its tokens or log-probs may be others than before the crash;
        # the new row counts, as its digest does in the log.
        if there is None or any(
            not np.array_equal(getattr(there, name), getattr(sample, name)) for name in PAYLOAD
        ):
            self._table.put([Row(sample.request, sample.version, columns_of(sample))])
        elif sample.reward is not None:  # its environment gave one
            self.reward(sample.request, sample.reward)

    def reward(
        self, request: RequestId, reward: float, parts: dict[str, float] | None = None
    ) -> None:
        """`parts`: what each reward function gave, by its label."""
        row = self._row(request)
        if row is not None and "reward" not in row.columns:
            self._table.extend({request: {"reward": reward, "parts": parts or {}}})

    def feed(
        self, action: act.Feed, prompt_ids: tuple[int, ...]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Body and arrays of the message that gives a group to the learner."""
        entries, arrays = to_message(self._chosen(action.group, action.samples))
        return {"samples": entries}, arrays | {"prompt_ids": np.asarray(prompt_ids, dtype=np.int32)}

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
                reward=_known(sample.reward),
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
            for sample in self._chosen(group, samples)
        ]

    def num_written(self, request: RequestId) -> int | None:
        """Tokens of a sample that the policy wrote; None: its payload is not here."""
        row = self._row(request)
        if row is None or "loss_mask" not in row.columns:
            return None
        return self._read(row).num_trained

    def num_tokens(self, group: GroupId) -> int:
        return sum(len(sample.token_ids) for sample in self.trajectories(group))

    def drop(self, group: GroupId) -> None:
        self._table.drop(group)

    def sync(self) -> None:
        """The loss of the host takes nothing of what is there now."""
        self._table.sync()

    def close(self) -> None:
        self._table.close()

    def _row(self, request: RequestId) -> Row | None:
        found = self._table.read(request.group, request.sample)
        return found[0] if found else None

    def _read(self, row: Row) -> Trajectory:
        return trajectory_of(row.request, row.version, row.columns)

    def _chosen(self, group: GroupId, samples: Sequence[int]) -> list[Trajectory]:
        found = {sample.request.sample: sample for sample in self.trajectories(group)}
        return [found[sample] for sample in samples]


def _known(reward: float | None) -> float:
    assert reward is not None, "only scored samples are trained"
    return reward


# -- in a cluster ----------------------------------------------------------------------------------


class SampleIndex(Samples):
    """The table without its payload."""

    def __init__(self, path: Path, num_shards: int) -> None:
        super().__init__(path)
        self.names = [f"storage{number}" for number in range(num_shards)]
        self.addresses: list[str] = [""] * num_shards
        self._crew: Crew | None = None
        self._unwritten: dict[tuple[StepIndex, GroupId], dict[str, Any]] = {}

    @property
    def is_ready(self) -> bool:
        return all(self.addresses)

    def start(self, crew: Crew) -> None:
        self._crew = crew
        for number, name in enumerate(self.names):
            crew.start("storage", name, {"shard": number})

    def ready(
        self, name: str, address: str, has: Sequence[GroupId], alive: Container[GroupId]
    ) -> None:
        """A shard is there (again): tell it what it missed, and everybody where it is."""
        assert self._crew is not None
        self.addresses[self.names.index(name)] = address
        for (_, group), body in list(self._unwritten.items()):
            if self._name_of(group) == name:
                self._crew.send(name, "trained", body)
        for group in has:
            if group not in alive:
                self._crew.send(name, "drop", {"group": group})
        for worker in list(self._crew.workers.values()) if self.is_ready else ():
            if worker.role == "instance":
                self._crew.send(worker.name, "storage", {"addresses": self.addresses})

    def lost(self, name: str) -> None:
        self.addresses[self.names.index(name)] = ""
        if self._crew is not None and not self._crew.closing:
            self._crew.restart(name)

    def wrote(self, step: StepIndex, group: GroupId) -> None:
        """A shard has put the group's lines into rollouts.jsonl."""
        self._unwritten.pop((step, group), None)

    def _name_of(self, group: GroupId) -> str:
        return self.names[shard_of(group, len(self.names))]

    def where(self, group: GroupId, samples: Sequence[int]) -> dict[str, Any]:
        address = self.addresses[shard_of(group, len(self.names))]
        return {"address": address, "group": group, "samples": list(samples)}

    def _tell(self, group: GroupId, kind: str, body: dict[str, Any]) -> None:
        if self._crew is not None:
            self._crew.send(self._name_of(group), kind, {"group": group, **body})

    # -- as in `Samples` --------------------------------------------------------------------------

    def put_meta(self, event: ev.SampleFinished, version: Version, meta: Mapping[str, Any]) -> None:
        """A shard has the row of a finished sample."""
        columns = {
            "num_tokens": event.num_tokens,
            "logprob_sum": meta["logprob_sum"],
            "turns": meta["turns"],
            "finish": event.finish.value,
            "segments": [list(segment) for segment in event.segments],
        }
        there = self._row(event.request)
        if there is None or any(there.columns[name] != columns[name] for name in columns):
            self._table.put([Row(event.request, version, columns)])
        if meta["reward"] is not None:
            self.reward(event.request, meta["reward"])

    def where_to_read(self, request: RequestId) -> dict[str, Any]:
        return {"rows": self.where(request.group, [request.sample])}

    def _read(self, row: Row) -> Trajectory:
        """Without its payload; `turns` of a row here are the spans of its mask."""
        columns = {name: value for name, value in row.columns.items() if name != "turns"}
        return trajectory_of(row.request, row.version, columns)

    def feed(
        self, action: act.Feed, prompt_ids: tuple[int, ...]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        chosen = self._chosen(action.group, action.samples)
        body = {
            "rows": self.where(action.group, action.samples),
            "rewards": [sample.reward for sample in chosen],
        }
        return body, {"prompt_ids": np.asarray(prompt_ids, dtype=np.int32)}

    def closing(
        self,
        step: StepIndex,
        group: GroupId,
        version: Version,
        samples: Sequence[int],
        prompt: Prompt,
    ) -> None:
        """The group's lines of rollouts.jsonl are due."""
        chosen = self._chosen(group, samples)
        body = {
            "step": step,
            "group": group,
            "version": version,
            "samples": list(samples),
            "rewards": [sample.reward for sample in chosen],
            "parts": [sample.parts for sample in chosen],
            "prompt": [prompt.index, list(prompt.token_ids), prompt.text, prompt.env],
        }
        self._unwritten[step, group] = body
        self._tell(group, "trained", body)

    def sync_shards(self) -> None:
        """The loss of this host takes no row that the shards have now."""
        assert self._crew is not None
        for name in self.names:
            self._crew.send(name, "sync", {})

    def trained(
        self, group: GroupId, samples: tuple[int, ...], prompt: Prompt, *, tokens: bool = False
    ) -> list[TrainedSample]:
        """For the figures of a step; tokens and text are written by the shards."""
        assert not tokens, "the shards have them"
        found: list[TrainedSample] = []
        for sample in super().trained(group, samples, prompt, tokens=False):
            columns = self._table.read(group, sample.sample)[0].columns
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
        return sum(row.columns["num_tokens"] for row in self._table.read(group))

    def drop(self, group: GroupId) -> None:
        super().drop(group)
        self._tell(group, "drop", {})
