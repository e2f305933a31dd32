"""The reward pool of a local run: samples out to worker processes, rewards back.

A worker that hangs past its time or dies is replaced, and costs its sample one attempt; the core
decides whether to try again. Where it had several, each is tried alone first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from dora_rl.rewards.base import ScoreItem
from dora_rl.types import Prompt, Trajectory
from dora_rl.workers.messages import Ints, Message, Ready, Reward, Scorable, Score, Scored, Where
from dora_rl.workers.pool import Worker, Workers

Answer: TypeAlias = Callable[[Reward], None]


@dataclass(frozen=True, slots=True)
class Job:
    item: Scorable
    token_ids: Ints
    answer: Answer
    alone: bool = False  # its worker ended while it had this one among others


class Failures:
    """Counts rewards that failed; tells of the first, the tenth, the hundredth and so on."""

    def __init__(self) -> None:
        self._num, self._num_told_next = 0, 1

    def add(self, why: str) -> list[str]:
        """A line for the console if it is time for one, else nothing."""
        self._num += 1
        if self._num < self._num_told_next:
            return []
        self._num_told_next *= 10
        head = "a reward failed" if self._num == 1 else f"{self._num} rewards failed, the last one"
        return [f"{head}: {why}"]


class ScoringPool:
    """Gives jobs to free workers, in order of arrival; as many at once as a worker asks for."""

    def __init__(self, workers: Workers, num_workers: int, timeout_s: float, extra: dict[str, Any]):
        self._workers = workers
        self._timeout_s = timeout_s
        self._waiting: deque[Job] = deque()
        self._free: list[str] = []
        self._busy: dict[str, tuple[int, list[Job], float]] = {}
        self._at_once: dict[str, int] = {}
        self._next = 0
        self._extra = extra
        self.num_answered = 0
        self.num_lost_in_a_row = 0  # workers that ended since the last answer of any
        self.failures = Failures()
        self.names = [f"reward{index}" for index in range(num_workers)]

    def start(self) -> None:
        for name in self.names:
            self._workers.start("reward", name, self._extra)

    def submit(
        self, prompt: Prompt, sample: Trajectory, answer: Answer, where: Where | None = None
    ) -> None:
        """`where`: the worker finds text and tokens there; those of `sample` are empty then."""
        wrote: Any = prompt.columns.get("prompt", prompt.text)
        item = ScoreItem(
            prompt=wrote,
            prompt_text=prompt.text,
            completion=sample.text,
            answer=prompt.answer,
            columns=prompt.columns,
            finish=sample.finish.value,
        )
        scorable = Scorable(item, len(sample.token_ids), where)
        self._waiting.append(Job(scorable, sample.token_ids, answer))
        self._give_out()

    def _give_out(self) -> None:
        while self._free and self._waiting:
            name = self._free.pop()
            jobs = [self._waiting.popleft()]
            while self._may_join(name, jobs):
                jobs.append(self._waiting.popleft())
            self._next += 1
            self._busy[name] = (self._next, jobs, self._workers.now())
            ids = np.concatenate([job.token_ids for job in jobs])
            self._workers.send(name, Score(self._next, tuple(job.item for job in jobs), ids))

    def _may_join(self, name: str, jobs: list[Job]) -> bool:
        if not self._waiting or jobs[0].alone or self._waiting[0].alone:
            return False
        return len(jobs) < self._at_once.get(name, 1)

    def hear(self, worker: Worker, message: Message) -> None:
        """What a reward worker says."""
        match message:
            case Ready(at_once):
                self._at_once[worker.name] = at_once
                self._free.append(worker.name)
                self._give_out()
            case Scored():
                self._scored(worker.name, message)
            case _:
                raise AssertionError(f"a reward worker does not say {message!r}")

    def _scored(self, name: str, message: Scored) -> None:
        number, jobs, _ = self._busy.pop(name, (-1, [], 0.0))
        self._free.append(name)
        self.num_lost_in_a_row = 0
        if number == message.id:
            self.num_answered += len(jobs)
            for job, reward in zip(jobs, message.rewards, strict=True):
                job.answer(reward)
        self._give_out()

    def lost(self, name: str) -> None:
        """A worker's process ended: its sample failed, a new worker takes the name."""
        self.num_lost_in_a_row += 1
        if name in self._free:
            self._free.remove(name)
        _, jobs, _ = self._busy.pop(name, (-1, [], 0.0))
        if not self._workers.closing:
            self._workers.restart(name)
        self._failed(jobs, "the reward ended its process")

    def check_time(self) -> None:
        """Replace workers that have been busy with one message for too long."""
        now = self._workers.now()
        for name, (_, jobs, since) in list(self._busy.items()):
            if now - since > self._timeout_s:
                del self._busy[name]
                self._workers.restart(name)
                self._failed(jobs, f"the reward did not answer within {self._timeout_s:g} s")

    def _failed(self, jobs: list[Job], why: str) -> None:
        """One of several may be to blame for the rest: each gets a worker to itself."""
        if len(jobs) == 1:
            jobs[0].answer(Reward(error=why))
        self._waiting.extend(replace(job, alone=True) for job in jobs if len(jobs) > 1)
        self._give_out()
