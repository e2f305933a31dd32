"""A reward worker: scores what it is given. Where functions only wait (a judge, asynchronous code)
it takes many samples at once, otherwise one, so that a hang or a crash costs that sample alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from dora_rl.rewards.base import ScoreError, ScoreItem, build
from dora_rl.store.storage import StorageReader
from dora_rl.workers.messages import Message, Ready, Reward, Score, Scored, Send
from dora_rl.workers.worker import Role, Setup


class Scorer(Role):
    """The functions of a run. A bad sample is an error, not an end."""

    def __init__(self, setup: Setup, send: Send) -> None:
        super().__init__(setup, send)
        section = setup.config.reward
        self._reward = build(section, Path(setup.extra["base_dir"]))
        self._reader = StorageReader(setup.run_key)
        self._at_once = section.concurrent_max if self._reward.many else 1

    def join(self) -> None:
        self.send(Ready(self._at_once))

    def hear(self, message: Message) -> None:
        """Answers every `Score`."""
        assert isinstance(message, Score)
        scores = self._reward.score_parts(read_items(message, self._reader))
        rewards = tuple(
            Reward(error=score.total.reason)
            if isinstance(score.total, ScoreError)
            else Reward(score.total, parts=score.parts)
            for score in scores
        )
        self.send(Scored(message.id, rewards))


def read_items(asked: Score, reader: StorageReader | None = None) -> list[ScoreItem]:
    """The samples of a message; their token ids lie one after the other, or in storage."""
    found: list[ScoreItem] = []
    ends = np.cumsum([one.num_tokens for one in asked.items])
    for one, end in zip(asked.items, ends, strict=True):
        ids, text = asked.token_ids[int(end) - one.num_tokens : int(end)], one.item.completion
        if one.where is not None and reader is not None:
            (stored,) = reader.rows(one.where)
            ids, text = stored.token_ids, stored.text
        found.append(replace(one.item, completion=text, completion_ids=tuple(ids.tolist())))
    return found
