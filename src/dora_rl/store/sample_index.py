"""The sample table as the controller of a cluster has it: metadata; the payload is in the shards.

Has what `samples.Samples` has, row for row, except tokens, log-probs and text; where those are
needed it says which shard to ask. Rewards are kept here: they decide what happens next.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.controller.records import TrainedSample
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.store.samples import Samples
from dora_rl.store.storage_client import shard_of
from dora_rl.store.table import Row
from dora_rl.store.trajectories import trajectory_of
from dora_rl.types import GroupId, Prompt, RequestId, StepIndex, Trajectory, Version
from dora_rl.workers.pool import WorkerPool


class SampleIndex(Samples):
    """The table without its payload."""

    def __init__(self, path: Path, num_shards: int) -> None:
        super().__init__(path)
        self.names = [f"storage{number}" for number in range(num_shards)]
        self.addresses: list[str] = [""] * num_shards
        self._pool: WorkerPool | None = None
        self._unwritten: dict[tuple[StepIndex, GroupId], dict[str, Any]] = {}

    @property
    def is_ready(self) -> bool:
        return all(self.addresses)

    def start(self, pool: WorkerPool) -> None:
        self._pool = pool
        for number, name in enumerate(self.names):
            pool.start("storage", name, {"shard": number})

    def ready(
        self, name: str, address: str, has: Sequence[GroupId], alive: Container[GroupId]
    ) -> None:
        """A shard is there (again): tell it what it missed, and everybody where it is."""
        assert self._pool is not None
        self.addresses[self.names.index(name)] = address
        for (_, group), body in list(self._unwritten.items()):
            if self._name_of(group) == name:
                self._pool.send(name, "trained", body)
        for group in has:
            if group not in alive:
                self._pool.send(name, "drop", {"group": group})
        for worker in list(self._pool.workers.values()) if self.is_ready else ():
            if worker.role == "instance":
                self._pool.send(worker.name, "storage", {"addresses": self.addresses})

    def lost(self, name: str) -> None:
        self.addresses[self.names.index(name)] = ""
        if self._pool is not None and not self._pool.closing:
            self._pool.restart(name)

    def wrote(self, step: StepIndex, group: GroupId) -> None:
        """A shard has put the group's lines into rollouts.jsonl."""
        self._unwritten.pop((step, group), None)

    def _name_of(self, group: GroupId) -> str:
        return self.names[shard_of(group, len(self.names))]

    def where(self, group: GroupId, samples: Sequence[int]) -> dict[str, Any]:
        address = self.addresses[shard_of(group, len(self.names))]
        return {"address": address, "group": group, "samples": list(samples)}

    def _tell(self, group: GroupId, kind: str, body: dict[str, Any]) -> None:
        if self._pool is not None:
            self._pool.send(self._name_of(group), kind, {"group": group, **body})

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
        assert self._pool is not None
        for name in self.names:
            self._pool.send(name, "sync", {})

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
