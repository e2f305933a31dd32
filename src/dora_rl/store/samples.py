"""The samples of a local run: rows of the table from the end of generation to the end of a group.

The row is written before the event that tells of it is logged, so whatever the log says is ready
is there after a crash.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.controller.records import TrainedSample
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.data.table import Table
from dora_rl.data.table_rows import NewRow, Row
from dora_rl.envs.text import spans
from dora_rl.io.wire import Message
from dora_rl.store.sample_digest import rounded
from dora_rl.types import Finish, GroupId, Prompt, RequestId, Version

CONSUMER = "learner"
PAYLOAD = ("token_ids", "logprobs", "loss_mask")


class Samples:
    """The table as the controller uses it."""

    def __init__(
        self, path: Path, group_size: int, needs: tuple[str, ...] = ("token_ids", "reward")
    ) -> None:
        self._table = Table({CONSUMER: needs}, path=path)
        self._group_size = group_size

    def row(self, request: RequestId) -> Row | None:
        found = self._table.read(self._table.rows_of(request.group, request.sample))
        return found[0] if found else None

    def groups(self) -> list[GroupId]:
        return self._table.groups()

    def rows(self, group: GroupId) -> list[Row]:
        return self._table.read(self._table.rows_of(group))

    def completion(
        self, request: RequestId
    ) -> tuple[str, NDArray[np.int32], dict[str, dict[str, Any]]]:
        """What is scored: text and tokens, or where whoever scores it finds them."""
        row = self.row(request)
        assert row is not None, f"the table has no row of {request}"
        return str(row.columns["text"]), np.asarray(row.columns["token_ids"], dtype=np.int32), {}

    def keep_only(self, groups: Collection[GroupId]) -> None:
        """After a crash: drop groups that the log knows to have ended."""
        for group in self._table.groups():
            if group not in groups:
                self._table.drop(group)

    def put(self, event: ev.SampleFinished, version: Version, message: Message, text: str) -> None:
        """A sample was generated. One that is there already was written just before a crash."""
        columns: dict[str, Any] = {
            "token_ids": message.arrays["token_ids"],
            "logprobs": message.arrays["logprobs"],
            "loss_mask": message.arrays["loss_mask"],
            "finish": event.finish.value,
            "segments": [list(segment) for segment in event.segments],
            "text": text,
        }
        row = NewRow(event.request.group, version, columns, event.request.sample, self._group_size)
        there = self.row(event.request)
        if there is None:
            self._table.put([row])
        elif any(not np.array_equal(_array(there, n), message.arrays[n]) for n in PAYLOAD):
            self._replace(row)
        if "reward" in message.arrays:  # its environment gave one
            self.reward(event.request, float(message.arrays["reward"][0]))

    def _replace(self, new: NewRow) -> None:
        """The new row counts, as its digest does in the log: where kernels are not exact, its
        tokens or log-probs may be others."""
        rows = [new]
        for row in self._table.read(self._table.rows_of(new.group)):
            if row.sample != new.sample:
                rows.append(
                    NewRow(row.group, row.version, row.columns, row.sample, self._group_size)
                )
        self._table.drop(new.group)
        self._table.put(rows)

    def stored_reward(self, request: RequestId) -> float | None:
        row = self.row(request)
        return float(str(row.columns["reward"])) if row and "reward" in row.columns else None

    def reward(
        self, request: RequestId, reward: float, parts: dict[str, float] | None = None
    ) -> None:
        """`parts`: what each reward function gave, by its label."""
        row = self.row(request)
        if row is not None and "reward" not in row.columns:
            self._table.extend({row.index: {"reward": reward, "parts": json.dumps(parts or {})}})

    def feed(
        self, action: act.Feed, prompt_ids: tuple[int, ...]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Body and arrays of the message that gives a group to the learner."""
        rows = self._rows(action.group, action.samples)
        body = {
            "lengths": [len(_array(row, "token_ids")) for row in rows],
            "segments": [row.columns["segments"] for row in rows],
            "rewards": [row.columns["reward"] for row in rows],
            "truncated": [row.columns["finish"] == Finish.LENGTH.value for row in rows],
        }
        arrays = {name: np.concatenate([_array(row, name) for row in rows]) for name in PAYLOAD}
        arrays["prompt_ids"] = np.asarray(prompt_ids, dtype=np.int32)
        return body, arrays

    def trained(
        self, group: GroupId, samples: tuple[int, ...], prompt: Prompt, *, tokens: bool = True
    ) -> list[TrainedSample]:
        """Without `tokens` only what the figures of a step are made of."""
        return [
            TrainedSample(
                group=group,
                sample=row.sample,
                version=row.version,
                num_prompt=len(prompt.token_ids),
                num_tokens=len(_array(row, "token_ids")),
                reward=float(str(row.columns["reward"])),
                finish=str(row.columns["finish"]),
                text=str(row.columns["text"]),
                prompt=prompt.text,
                segments=len(list_of(row, "segments")),
                logprobs=rounded(_array(row, "logprobs")) if tokens else [],
                logprob_sum=float(_array(row, "logprobs").sum(dtype=np.float64)),
                token_ids=_array(row, "token_ids").tolist() if tokens else [],
                parts=json.loads(str(row.columns["parts"])),
                env=prompt.env,
                turns=spans(_array(row, "loss_mask").tolist()),
            )
            for row in self._rows(group, samples)
        ]

    def num_written(self, request: RequestId) -> int | None:
        """Tokens of a sample that the policy wrote; None: its row is not here."""
        row = self.row(request)
        there = row is not None and "loss_mask" in row.columns
        return int(_array(row, "loss_mask").sum()) if row is not None and there else None

    def num_tokens(self, group: GroupId) -> int:
        rows = self._table.read(self._table.rows_of(group))
        return sum(len(_array(row, "token_ids")) for row in rows)

    def drop(self, group: GroupId) -> None:
        self._table.drop(group)

    def sync(self) -> None:
        """The loss of the host takes nothing of what is there now."""
        self._table.sync()

    def close(self) -> None:
        self._table.close()

    def _rows(self, group: GroupId, samples: tuple[int, ...]) -> list[Row]:
        rows = {row.sample: row for row in self._table.read(self._table.rows_of(group))}
        return [rows[sample] for sample in samples]


def _array(row: Row, name: str) -> NDArray[Any]:
    value = row.columns[name]
    assert isinstance(value, np.ndarray)
    return value


def list_of(row: Row, name: str) -> list[Any]:
    value = row.columns[name]
    assert isinstance(value, list)
    return value
