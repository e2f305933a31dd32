"""A reward worker: scores what it is given. Where functions only wait (a judge, asynchronous code)
it takes many samples at once, otherwise one, so that a hang or a crash costs that sample alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dora_rl.rewards.base import ScoreError, ScoreItem, build
from dora_rl.rewards.endpoint import EndpointFailed
from dora_rl.rewards.teacher import ServedTeacher
from dora_rl.store.storage import StorageReader
from dora_rl.workers.messages import Lesson, Message, Ready, Reward, Score, Scored, Send
from dora_rl.workers.worker import Role, Setup

if TYPE_CHECKING:
    from dora_rl.types import Floats


class Scorer(Role):
    """The functions of a run, and its teacher. A bad sample is an error, not an end."""

    def __init__(self, setup: Setup, send: Send) -> None:
        super().__init__(setup, send)
        section = setup.config.reward
        functions, base_dir = section.functions, Path(setup.extra["base_dir"])
        self._reward = build(section, base_dir) if functions else None
        self._teacher = ServedTeacher(section) if section.teacher_url else None
        self._reader = StorageReader(setup.run_key)
        waits = self._teacher is not None or (self._reward is not None and self._reward.many)
        self._at_once = section.concurrent_max if waits else 1

    def join(self) -> None:
        self.send(Ready(self._at_once))

    def hear(self, message: Message) -> None:
        """Answers every `Score`."""
        assert isinstance(message, Score)
        items = read_items(message, self._reader)
        lessons = [one.lesson for one in message.items]
        rewards = [
            Reward(lesson.reward) if lesson is not None and lesson.reward is not None else None
            for lesson in lessons
        ]
        open_places = [place for place, known in enumerate(rewards) if known is None]
        scored = self._score([items[place] for place in open_places])
        for place, reward in zip(open_places, scored, strict=True):
            rewards[place] = reward
        done = [reward for reward in rewards if reward is not None]
        self.send(Scored(message.id, tuple(self._taught(done, items, lessons))))

    def _score(self, items: list[ScoreItem]) -> list[Reward]:
        if self._reward is None or not items:
            return [Reward(error="reward.functions is empty")] * len(items)
        return [
            Reward(error=score.total.reason)
            if isinstance(score.total, ScoreError)
            else Reward(score.total, parts=score.parts)
            for score in self._reward.score_parts(items)
        ]

    def _taught(
        self, rewards: list[Reward], items: list[ScoreItem], lessons: list[Lesson | None]
    ) -> list[Reward]:
        """With the teacher's log-probs; a sample without them has failed."""
        if self._teacher is None:
            return rewards
        asked = {
            place: (
                np.array(lesson.prompt_ids, np.int32),
                np.array(item.completion_ids, np.int32),
                np.array(lesson.loss_mask, np.uint8),
                lesson.branches,
            )
            for place, (item, lesson) in enumerate(zip(items, lessons, strict=True))
            if lesson is not None and rewards[place].total is not None
        }
        found = dict(zip(asked, self._teacher.several(list(asked.values())), strict=True))
        return [
            _with_teacher(reward, found[place]) if place in found else reward
            for place, reward in enumerate(rewards)
        ]


def _with_teacher(reward: Reward, found: Floats | EndpointFailed) -> Reward:
    if isinstance(found, EndpointFailed):
        return Reward(error=str(found))
    return replace(reward, teacher_logprobs=tuple(found.tolist()))


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
