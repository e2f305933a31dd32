"""The sample table as the controller of a cluster has it: metadata; the payload is in the shards.

Has what `samples.Samples` has, row for row, except tokens, log-probs and text; where those are
needed it says which shard to ask. Rewards are kept here: they decide what happens next.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.controller.records import TrainedSample
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.data.table_rows import NewRow
from dora_rl.io.wire import Message
from dora_rl.store.samples import Samples, list_of
from dora_rl.store.storage_client import shard_of
from dora_rl.types import Finish, GroupId, Prompt, RequestId, StepIndex, Version
from dora_rl.workers.crew import Crew


class SampleIndex(Samples):
    """The table without its payload."""

    def __init__(self, path: Path, group_size: int, num_shards: int) -> None:
        super().__init__(path, group_size, needs=("num_tokens", "reward"))
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

    def put_meta(self, event: ev.SampleFinished, version: Version, message: Message) -> None:
        """A shard has the row of a finished sample."""
        columns = {
            "num_tokens": event.num_tokens,
            "logprob_sum": message.body["meta"]["logprob_sum"],
            "turns": message.body["meta"]["turns"],
            "finish": event.finish.value,
            "segments": [list(segment) for segment in event.segments],
        }
        row = NewRow(event.request.group, version, columns, event.request.sample, self._group_size)
        there = self.row(event.request)
        if there is None:
            self._table.put([row])
        elif any(there.columns[name] != value for name, value in columns.items()):
            self._replace(row)
        if "reward" in message.arrays:
            self.reward(event.request, float(message.arrays["reward"][0]))

    def completion(self, request: RequestId) -> tuple[str, NDArray[np.int32], dict[str, Any]]:
        where = self.where(request.group, [request.sample])
        return "", np.zeros(0, dtype=np.int32), {"rows": where}

    def feed(
        self, action: act.Feed, prompt_ids: tuple[int, ...]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        rows = self._rows(action.group, action.samples)
        body = {
            "rows": self.where(action.group, action.samples),
            "lengths": [row.columns["num_tokens"] for row in rows],
            "segments": [row.columns["segments"] for row in rows],
            "rewards": [row.columns["reward"] for row in rows],
            "truncated": [row.columns["finish"] == Finish.LENGTH.value for row in rows],
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
        rows = self._rows(group, tuple(samples))
        body = {
            "step": step,
            "group": group,
            "version": version,
            "samples": list(samples),
            "rewards": [row.columns["reward"] for row in rows],
            "parts": [json.loads(str(row.columns["parts"])) for row in rows],
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
        return [
            TrainedSample(
                group=group,
                sample=row.sample,
                version=row.version,
                num_prompt=len(prompt.token_ids),
                num_tokens=int(str(row.columns["num_tokens"])),
                reward=float(str(row.columns["reward"])),
                finish=str(row.columns["finish"]),
                text="",
                prompt="",
                segments=len(list_of(row, "segments")),
                logprobs=[],
                logprob_sum=float(str(row.columns["logprob_sum"])),
                token_ids=[],
                parts=json.loads(str(row.columns["parts"])),
                env=prompt.env,
                turns=[(begin, end, mask) for begin, end, mask in list_of(row, "turns")],
            )
            for row in self._rows(group, samples)
        ]

    def num_tokens(self, group: GroupId) -> int:
        return sum(int(str(row.columns["num_tokens"])) for row in self.rows(group))

    def drop(self, group: GroupId) -> None:
        super().drop(group)
        self._tell(group, "drop", {})
