"""The reward pool of a local run: samples out to worker processes, rewards back.

A worker that hangs past its time or dies is replaced, and costs its sample one attempt; the core
decides whether to try again. Where it had several, each is tried alone first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.types import Prompt
from dora_rl.workers.pool import WorkerPool

Answer = Callable[[float | None, str], None]
"""Called with (reward, "") or (None, why not)."""

Note = Callable[[dict[str, float]], None]
"""Called before the answer with what each function gave, by its label."""


@dataclass(frozen=True, slots=True)
class Job:
    body: dict[str, Any]
    token_ids: NDArray[np.int32]
    answer: Answer
    note: Note | None = None
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

    def __init__(self, pool: WorkerPool, num_workers: int, timeout_s: float, extra: dict[str, Any]):
        self._pool = pool
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
            self._pool.start("reward", name, self._extra)

    def submit(
        self,
        prompt: Prompt,
        text: str,
        token_ids: NDArray[np.int32],
        finish: str,
        answer: Answer,
        note: Note | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        """`more` may say where the worker finds text and tokens, which are empty then."""
        body = {
            "prompt": prompt.columns.get("prompt", prompt.text),
            "prompt_text": prompt.text,
            "completion": text,
            "answer": prompt.answer,
            "columns": prompt.columns,
            "finish": finish,
            "num_tokens": len(token_ids),
            **(more or {}),
        }
        self._waiting.append(Job(body, token_ids, answer, note))
        self._give_out()

    def _give_out(self) -> None:
        while self._free and self._waiting:
            name = self._free.pop()
            jobs = [self._waiting.popleft()]
            while self._may_join(name, jobs):
                jobs.append(self._waiting.popleft())
            self._next += 1
            self._busy[name] = (self._next, jobs, time.monotonic())
            body = {"id": self._next, "items": [job.body for job in jobs]}
            ids = np.concatenate([job.token_ids for job in jobs])
            self._pool.send(name, "score", body, {"token_ids": ids})

    def _may_join(self, name: str, jobs: list[Job]) -> bool:
        if not self._waiting or jobs[0].alone or self._waiting[0].alone:
            return False
        return len(jobs) < self._at_once.get(name, 1)

    def ready(self, name: str, at_once: int) -> None:
        self._at_once[name] = at_once
        self._free.append(name)
        self._give_out()

    def scored(self, name: str, body: dict[str, Any]) -> None:
        """A worker answered."""
        number, jobs, _ = self._busy.pop(name, (-1, [], 0.0))
        self._free.append(name)
        self.num_lost_in_a_row = 0
        if number == body["id"]:
            self.num_answered += len(jobs)
            for job, result in zip(jobs, body["results"], strict=True):
                if job.note is not None:
                    job.note(result.get("parts", {}))
                job.answer(result.get("reward"), result.get("error", ""))
        self._give_out()

    def lost(self, name: str) -> None:
        """A worker's process ended: its sample failed, a new worker takes the name."""
        self.num_lost_in_a_row += 1
        if name in self._free:
            self._free.remove(name)
        _, jobs, _ = self._busy.pop(name, (-1, [], 0.0))
        if not self._pool.closing:
            self._pool.restart(name)
        self._failed(jobs, "the reward ended its process")

    def check_time(self) -> None:
        """Replace workers that have been busy with one message for too long."""
        now = time.monotonic()
        for name, (_, jobs, since) in list(self._busy.items()):
            if now - since > self._timeout_s:
                del self._busy[name]
                self._pool.restart(name)
                self._failed(jobs, f"the reward did not answer within {self._timeout_s:g} s")

    def _failed(self, jobs: list[Job], why: str) -> None:
        """One of several may be to blame for the rest: each gets a worker to itself."""
        if len(jobs) == 1:
            jobs[0].answer(None, why)
        self._waiting.extend(replace(job, alone=True) for job in jobs if len(jobs) > 1)
        self._give_out()
